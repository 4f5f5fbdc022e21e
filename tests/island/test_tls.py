"""Islands and a coordinator that know each other by certificates; and what is said where they do not."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from benchmarks.certificates import DAY, HERE, Authority
from coordinator.cli import coordinator
from diloco.errors import ExitCode, InputError, Unreachable, Untrusted
from diloco.framing import SERVICE
from diloco.tls import TLS
from island.cli import status
from tests.processes import Hand, command_here, free_port
from tests.support import MODEL, Visitor, configure, draw, floats, serving, visit


@pytest.fixture
def stack() -> ExitStack:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serve(stack: ExitStack, folder: Path, tls: TLS | None) -> str:
    return stack.enter_context(serving(configure(), folder / "state", tls=tls)).address


def visitor(stack: ExitStack, address: str, tls: TLS | None) -> Visitor:
    """An island that tries once."""
    return stack.enter_context(visit(address, "tokyo", MODEL, patience_s=0.0, tls=tls))


def test_what_goes_both_ways_arrives(stack: ExitStack, tmp_path: Path, authority: Authority) -> None:
    served = stack.enter_context(serving(configure(), tmp_path / "state", tls=authority.issue("coordinator")))
    island = visitor(stack, served.address, authority.issue("tokyo"))
    island.join()
    for fragment in served.run.fragments:
        island.push(fragment, draw(fragment, 0), seed=True)
    assert island.beat(ready=True).phase == "running"
    for fragment in served.run.fragments:
        _, payload = island.fetch(fragment, anchor=True)
        assert floats(payload).equal(draw(fragment, 0))


def refusal(stack: ExitStack, address: str, tls: TLS | None) -> str:
    """What an island is told that is not let in."""
    with pytest.raises(Untrusted) as caught:
        visitor(stack, address, tls).join()
    return str(caught.value)


def test_an_island_without_tls_is_told_to_use_it(stack: ExitStack, tmp_path: Path, authority: Authority) -> None:
    address = serve(stack, tmp_path, authority.issue("coordinator"))
    assert f"{address} speaks TLS: name your files" in refusal(stack, address, None)


def test_an_island_with_tls_is_told_that_the_coordinator_has_none(
    stack: ExitStack, tmp_path: Path, authority: Authority
) -> None:
    address = serve(stack, tmp_path, None)
    assert f"{address} does not speak TLS: start it with" in refusal(stack, address, authority.issue("tokyo"))


def test_the_certificate_of_another_authority_is_not_accepted(
    stack: ExitStack, tmp_path: Path, authority: Authority
) -> None:
    address = serve(stack, tmp_path, authority.issue("coordinator"))
    foreign = replace(Authority(tmp_path, "foreign").issue("tokyo"), ca=str(authority.path))
    assert f"does not accept the certificate {foreign.cert}: use one" in refusal(stack, address, foreign)


def test_a_client_without_a_certificate_is_not_accepted(stack: ExitStack, tmp_path: Path, authority: Authority) -> None:
    address = serve(stack, tmp_path, authority.issue("coordinator"))
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/Status")(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_coordinator_of_another_authority_is_not_trusted(
    stack: ExitStack, tmp_path: Path, authority: Authority
) -> None:
    address = serve(stack, tmp_path, authority.issue("coordinator"))
    tls = Authority(tmp_path, "foreign").issue("tokyo")
    assert f"no authority in {tls.ca} has signed the certificate" in refusal(stack, address, tls)


def test_a_coordinator_of_another_name_is_not_trusted_unless_it_is_expected(
    stack: ExitStack, tmp_path: Path, authority: Authority
) -> None:
    address = serve(stack, tmp_path, authority.issue("coordinator", names=["coordinator.example"]))
    tls = authority.issue("tokyo")
    assert "is for another name than 127.0.0.1: make one with" in refusal(stack, address, tls)
    visitor(stack, address, replace(tls, server_name="coordinator.example")).join()


def test_a_certificate_that_expires_while_a_coordinator_runs_is_named(
    stack: ExitStack, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.tls._check_time", lambda *_: None)
    address = serve(stack, tmp_path, authority.issue("coordinator", valid=(-2 * DAY, -DAY)))
    tls = authority.issue("tokyo")
    assert "of its authority, has expired: make a new one" in refusal(stack, address, tls)


def test_nobody_there_is_not_a_matter_of_trust(stack: ExitStack, authority: Authority) -> None:
    with pytest.raises(Unreachable, match="no coordinator answers") as caught:
        visitor(stack, f"127.0.0.1:{free_port()}", authority.issue("tokyo")).join()
    assert type(caught.value) is Unreachable


# -- commands -----------------------------------------------------------------------------------------------------


def options(tls: TLS) -> list[str]:
    return ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca]


def test_operators_use_the_same_options(stack: ExitStack, tmp_path: Path, authority: Authority) -> None:
    address = serve(stack, tmp_path, authority.issue("coordinator", names=[*HERE, "coordinator.example"]))
    tls = authority.issue("operator")
    for more in ([], ["--tls-server-name", "coordinator.example"]):
        assert command_here(status, address, "--json", *options(tls), *more).code == ExitCode.OK
    ended = command_here(status, address, "--timeout", "0")
    assert ended.code == ExitCode.UNREACHABLE
    assert f"error: the coordinator at {address} speaks TLS" in ended.err


@pytest.mark.parametrize("command", [status, coordinator], ids=["status", "coordinator"])
def test_two_files_are_not_enough(command: object, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[run]\nid = "x"\n')
    where = ["127.0.0.1:1"] if command is status else [str(run), "--state", f"{tmp_path}/s", "--listen", "127.0.0.1:0"]
    ended = command_here(command, *where, "--tls-cert", "a", "--tls-key", "b")  # type: ignore[arg-type]
    assert ended.code == ExitCode.USAGE
    assert "--tls-cert, --tls-key and --tls-ca go together" in ended.err


def test_a_coordinator_checks_its_files_before_it_begins(tmp_path: Path, authority: Authority) -> None:
    run, tls = tmp_path / "run.toml", authority.issue("coordinator")
    run.write_text('[run]\nid = "x"\n')
    Path(tls.key).unlink()
    ended = command_here(
        coordinator, str(run), "--state", f"{tmp_path}/state", "--listen", "127.0.0.1:0", *options(tls)
    )
    assert ended.code == ExitCode.USAGE
    assert "coordinator.key, which TLS needs: No such file" in ended.err
    assert not (tmp_path / "state").exists()


def test_an_island_checks_its_files_before_it_knocks(authority: Authority) -> None:
    tls = replace(authority.issue("tokyo"), key="/nowhere")
    with pytest.raises(InputError, match="cannot read /nowhere"), visit("127.0.0.1:1", "tokyo", tls=tls):
        pass


def test_a_run_by_hand_over_mutual_tls(stack: ExitStack, tmp_path: Path, authority: Authority) -> None:
    hand = Hand(tmp_path, stack, steps=8, run='[sync]\nevery_steps = 4\n[wire]\nup = "bf16"\ndown = "bf16"\n')
    tls = authority.issue("coordinator")
    process = hand.coordinator("127.0.0.1:0", *options(tls))
    overrides = [f"tls.{name}={getattr(authority.issue('x'), name)}" for name in ("cert", "key", "ca")]
    assert hand.island("x", *overrides).wait() == ExitCode.OK, hand.islands["x"].output
    assert "mutual TLS; the certificate" in process.output
    [end] = hand.records("x", "end")
    assert end["rounds"] == 2
