"""Whether a coordinator is ready: every check fails and recovers, and whoever watches hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.health import PROBE_S, Checks, Health, judge, probe
from diloco.framing import SERVICE
from tests.support import BOUND_S, Clock, Rig, draw

GOOD = Checks(unfolded=0, working=True, troubles=(), probe="", free_bytes=100, least_free_bytes=100, closing=False)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unfolded": 3}, "recovery: 3 rounds from before its start are not folded yet"),
        ({"working": False}, "folding: the tasks that decide and fold rounds have ended"),
        ({"troubles": ("it is full",)}, "disk: it is full"),
        ({"probe": "read-only", "troubles": ("it is full",)}, "disk: read-only; it is full"),
        ({"free_bytes": 99}, "space: 99 bytes are free, limits.disk_free_bytes is 100"),
        ({"closing": True}, "shutdown: it is shutting down"),
    ],
)
def test_every_check_makes_a_coordinator_not_ready_and_says_why(change: dict[str, Any], reason: str) -> None:
    assert judge(GOOD) == (True, [])
    assert judge(replace(GOOD, **change)) == (False, [reason])


def test_the_probe_writes_and_leaves_nothing(tmp_path: Path) -> None:
    assert probe(tmp_path) > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        probe(tmp_path / "gone")


class Disk:
    """A disk whose faults the test makes."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.free = 2**40
        self.writes = 0
        self.free_to_go = threading.Event()
        self.free_to_go.set()

    def __call__(self, folder: Path) -> int:
        assert self.free_to_go.wait(BOUND_S)
        self.writes += 1
        if self.error:
            raise self.error
        return self.free


class Ward:
    """The health of a served run, looked at when the test says so."""

    def __init__(self, at: Rig) -> None:
        self.at, self.disk, self.clock = at, Disk(), Clock()

        async def make() -> Health:
            return Health(at.run, self.clock, probe=self.disk, slow_s=0.05)

        self.health = at.served.call(make())

    def look(self, after_s: float = PROBE_S) -> list[str]:
        self.clock.now += after_s
        self.at.served.call(self.health.look())
        return self.health.reasons


@pytest.fixture
def ward(at: Rig) -> Iterator[Ward]:
    found = Ward(at)
    yield found
    at.served.call(found.health.close())


def test_a_disk_that_fails_and_recovers(ward: Ward, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert ward.look() == []
    ward.disk.error = OSError(30, "Read-only file system")
    for _ in range(2):
        assert ward.look() == [f"disk: cannot write to {ward.at.run.store.root}: [Errno 30] Read-only file system"]
    ward.disk.error = None
    assert ward.look() == []
    said = [record.message for record in caplog.records if "ready" in record.message]
    assert len(said) == 3  # it speaks when the reason changes
    assert said[0] == said[2] == "ready"


def test_a_disk_that_hangs_and_recovers(ward: Ward) -> None:
    ward.disk.free_to_go.clear()
    for _ in range(2):
        assert ward.look() == [f"disk: writing to {ward.at.run.store.root} takes longer than 0.05 s"]
    assert ward.disk.writes == 0
    ward.disk.free_to_go.set()
    ward.at.served.call(asyncio.wait_for(asyncio.shield(ward.health._probing), BOUND_S))  # type: ignore[arg-type]
    assert ward.look() == []
    assert ward.disk.writes == 1


def test_the_disk_is_written_to_now_and_then_only(ward: Ward) -> None:
    for after_s in (0.0, PROBE_S / 2, PROBE_S / 4):
        ward.look(after_s)
    assert ward.disk.writes == 1
    ward.look(PROBE_S / 4)
    assert ward.disk.writes == 2


def test_a_disk_that_fills_up_and_is_cleared(ward: Ward) -> None:
    ward.disk.free = 1000
    assert ward.look() == ["space: 1,000 bytes are free, limits.disk_free_bytes is 268,435,456"]
    ward.disk.free = 2**40
    assert ward.look() == []


def test_what_the_run_waits_for_its_disk_for(ward: Ward) -> None:
    ward.at.served.ask(lambda run: run._waits("fold", "the run waits for its disk: it is full"))
    assert ward.look() == ["disk: the run waits for its disk: it is full"]
    ward.at.served.ask(lambda run: run._waits("fold"))
    assert ward.look() == []


def test_tasks_that_have_ended(ward: Ward) -> None:
    async def end_one() -> Any:
        tasks = ward.at.run._tasks
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(None)
        ward.at.run._tasks = [*tasks, ended]  # type: ignore[list-item]
        await ward.health.look()
        ward.at.run._tasks = tasks

    ward.at.served.call(end_one())
    assert ward.health.reasons == ["folding: the tasks that decide and fold rounds have ended"]
    assert ward.look() == []


def test_rounds_that_were_decided_before_the_start(at: Rig) -> None:
    a, b = at.started("a", "b")
    f = at.run.fragments[0]
    for visitor in (a, b):
        visitor.push(f, draw(f, 1))
    a.fetch(f)
    ward = Ward(at)
    at.served.ask(lambda run: run.ended.__setitem__(0, 0))
    assert ward.look() == ["recovery: 1 rounds from before its start are not folded yet"]
    at.served.ask(lambda run: run.ended.__setitem__(0, 1))
    assert ward.look() == []
    at.served.call(ward.health.close())


def test_a_look_that_fails_as_nobody_foresaw_fails_the_run(ward: Ward) -> None:
    def broken(folder: Path) -> int:
        raise ZeroDivisionError

    async def begin() -> BaseException | None:
        ward.health._probe = broken
        ward.health.begin()
        await asyncio.wait({ward.at.run.failed}, timeout=BOUND_S)
        error, ward.at.run.failed = ward.at.run.failed.exception(), asyncio.get_running_loop().create_future()
        return error

    assert isinstance(ward.at.served.call(begin()), ZeroDivisionError)


# -- over the line --------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(at: Rig) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(at.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def request(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_liveness_and_readiness_are_told_apart(at: Rig, stub: Any) -> None:
    health = at.served.health
    health._probe = disk = Disk()
    assert stub.Check(request(SERVICE), timeout=BOUND_S).status == NOT_SERVING
    at.served.call(health.look())
    assert stub.Check(request(SERVICE), timeout=BOUND_S).status == SERVING
    disk.free = 0
    at.clock.now += PROBE_S
    at.served.call(health.look())
    assert stub.Check(request(""), timeout=BOUND_S).status == SERVING
    assert stub.Check(request(SERVICE), timeout=BOUND_S).status == NOT_SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(request("other"), timeout=BOUND_S)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_who_watches_hears_of_every_change(at: Rig, stub: Any) -> None:
    health = at.served.health
    health._probe = disk = Disk()
    watched = iter(stub.Watch(request(SERVICE), timeout=BOUND_S))

    def then(act: Callable[[], object]) -> int:
        act()
        return next(watched).status  # type: ignore[no-any-return]

    def look() -> None:
        at.clock.now += PROBE_S
        at.served.call(health.look())

    def fill() -> None:
        disk.free = 0
        look()

    assert next(watched).status == NOT_SERVING
    assert then(look) == SERVING
    assert then(fill) == NOT_SERVING
    disk.free = 2**40
    assert then(look) == SERVING
    assert then(lambda: at.served.call(health.close())) == NOT_SERVING
    assert health.reasons == ["shutdown: it is shutting down"]
    assert stub.Check(request(SERVICE), timeout=BOUND_S).status == NOT_SERVING
    assert stub.Check(request(""), timeout=BOUND_S).status == NOT_SERVING
