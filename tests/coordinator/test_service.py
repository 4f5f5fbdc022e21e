"""The service over a real connection: joining, first parameters, contributions, updates, and starting again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

import coordinator.service
import island.link
from coordinator import bulk
from coordinator.fold import Outer, digest_of, fold
from coordinator.run import Run
from coordinator.store import UPDATES_KEPT
from diloco.codec import CODECS
from diloco.errors import Conflict, DilocoError, EnvironmentFault, Malformed, RunMismatch, StaleEpoch
from diloco.fragments import partition
from diloco.layout import Box, Layout, Piece, TensorSpec
from diloco.settings import to_toml
from diloco.window import FIRST_BYTES, Window
from tests.support import (
    BOUND_S,
    MODEL,
    Rig,
    Visitor,
    configure,
    draw,
    floats,
    part,
    payload,
    serving,
    visit,
    wait_quiet,
)

CONFIG = configure("rounds.start_islands=2", "rounds.quorum=2")
FRAGMENTS = partition(MODEL, CONFIG.sync)
Make = Callable[..., Rig]
FRAGMENT, OTHER, STATIC = FRAGMENTS
EMBED, MEAN, WEIGHT = FRAGMENT.tensors
LEFT = [Piece(EMBED, Box((0, 0), (6, 1))), Piece(WEIGHT, Box((0, 0), (2, 3)))]
RIGHT = [Piece(EMBED, Box((0, 1), (6, 3))), Piece(WEIGHT, Box((2, 0), (3, 3))), Piece(MEAN, Box((0,), (3,)))]
"""Two ranks' pieces of `FRAGMENT`: columns of the first tensor, rows of the last."""


def senders(at: Rig) -> list[str]:
    """Whose contributions are kept: a file each for every part."""
    return [name.split("-")[2] for name in at.inbox()]


def seed(visitor: Visitor) -> None:
    for fragment in FRAGMENTS:
        assert not visitor.push(fragment, draw(fragment, 0), seed=True).duplicate


def first_step(gradient: Tensor) -> Tensor:
    """The first update of `FRAGMENT` by this mean gradient, flat."""
    zero = Outer.first(FRAGMENT, torch.zeros(FRAGMENT.numel))
    return -fold(FRAGMENT, zero, {"a": [part(FRAGMENT, gradient)]}, {"a": 1.0}, CONFIG.outer, CODECS["fp32"])[0].anchor


# -- control --------------------------------------------------------------------------------------------------------


def test_a_join_is_answered_with_an_epoch_the_settings_and_the_state(at: Rig) -> None:
    reply = at.visitor("b").join()
    assert (reply.run_id, reply.epoch) == ("test", 1)
    assert reply.config_toml == to_toml(CONFIG)
    assert (reply.state.phase, reply.state.seeder) == ("gathering", "b")
    assert reply.state.reason == "waiting for first parameters from b"
    assert [(f.fragment, f.version, f.seeded) for f in reply.state.fragments] == [(i, 0, False) for i in range(3)]
    assert at.visitor("a").join(run_id="test").epoch == 2


def test_the_status_shows_the_run_and_its_islands(at: Rig) -> None:
    a, b = at.started("a", "b")
    a.beat(step=3, tokens=500, tokens_per_second=2.5, loss=1.25, outer_loss=1.5, bytes_up=7, bytes_down=9)
    a.push(FRAGMENT, draw(FRAGMENT, 1), tokens=10)
    status = b.link.status()
    assert (status.run_id, status.steps, status.layout_digest) == ("test", 12, MODEL.digest)
    assert (status.parameters, status.config_toml) == (MODEL.numel, to_toml(CONFIG))
    assert (status.rounds_committed, status.rounds_skipped) == (0, 0)
    assert status.state.fragments[0].waiting_for == "1 more contributions (b), for at most 600 s more"
    first, second = status.islands
    assert (first.id, first.state, first.epoch, first.ranks) == ("a", "ACTIVE", a.identity.epoch, 1)
    progress = first.progress
    assert (progress.step, progress.tokens, progress.tokens_per_second) == (3, 500, 2.5)
    assert (progress.loss, progress.outer_loss) == (1.25, 1.5)
    assert (progress.bytes_up, progress.bytes_down, progress.ready) == (7, 9, True)
    assert (second.id, second.progress.step) == ("b", 0)
    b.push(FRAGMENT, draw(FRAGMENT, 2))
    b.fetch(FRAGMENT)
    status = b.link.status()
    assert (status.rounds_committed, [i.contributions for i in status.islands]) == (1, [1, 1])


def test_the_status_of_a_run_that_nobody_has_joined(at: Rig) -> None:
    status = at.visitor("a").link.status()
    assert (status.run_id, status.layout_digest, status.parameters) == ("test", "", 0)
    assert (status.state.phase, status.state.reason) == ("gathering", "waiting for an island")
    assert not status.islands


def test_heartbeats_renew_a_lease_and_without_them_it_is_lost(at: Rig) -> None:
    a, b = at.island("a"), at.island("b")
    at.tick(29.75)
    a.beat()
    at.tick(0.25)
    assert [i.state for i in a.link.status().islands] == ["JOINING", "LOST"]
    with pytest.raises(StaleEpoch, match=r"island 'b' holds no lease under epoch .* \(no heartbeat for 30 s\)"):
        b.beat()
    assert a.link.status().islands[1].reason == "no heartbeat for 30 s"
    b.join()
    b.beat()


def test_only_a_newcomer_is_told_where_the_run_stands(at: Rig) -> None:
    a, _ = at.started("a", "b")
    a.beat(step=7)
    newcomer = at.island("n")
    assert newcomer.beat().step == 7
    assert a.beat(step=8).step == 0


def test_a_leaving_island_says_why_and_how_far_it_came(at: Rig) -> None:
    a, b = at.started("a", "b")
    a.leave("finished", step=11)
    row = b.link.status().islands[0]
    assert (row.state, row.reason, row.progress.step) == ("LEFT", "finished", 11)
    with pytest.raises(StaleEpoch, match=r"\(finished\): join again"):
        a.beat()
    with pytest.raises(StaleEpoch):
        a.leave("finished again")


# -- first parameters -----------------------------------------------------------------------------------------------


def test_first_parameters_come_back_as_anchors_whole_or_in_pieces(at: Rig) -> None:
    a, b = at.island("a"), at.island("b")
    seed(a)
    for fragment in FRAGMENTS:
        header, payload = b.fetch(fragment, anchor=True)
        assert torch.equal(floats(payload), draw(fragment, 0))
        assert (header.outcome, header.version, header.round) == ("anchor", 0, 0)
        assert header.digest == digest_of(fragment, draw(fragment, 0)) & (2**64 - 1)
    embed = draw(FRAGMENT, 0)[:24].view(6, 4)
    _, payload = b.fetch(FRAGMENT, [Piece(EMBED, Box((1, 2), (4, 2))), Piece(EMBED, Box((5, 0), (1, 4)))], anchor=True)
    assert torch.equal(floats(payload), torch.cat([embed[1:5, 2:].flatten(), embed[5]]))
    assert b.fetch(FRAGMENT, [], anchor=True)[1].numel() == 0


def test_a_run_is_seeded_once_all_ranks_parts_are_durable(at: Rig) -> None:
    a = at.island("a")
    for fragment in (STATIC, OTHER):
        a.push(fragment, draw(fragment, 0), seed=True)
    a.push(FRAGMENT, draw(FRAGMENT, 0), RIGHT, rank=1, seed=True)
    assert not any(f.seeded for f in a.beat().fragments)
    assert not list(at.run.store.root.glob("manifest-*"))
    a.push(FRAGMENT, draw(FRAGMENT, 0), LEFT, rank=0, seed=True)
    state = a.beat(ready=True)
    assert (state.seeder, state.reason) == ("", "1 of 2 islands are ready")
    assert [f.digest for f in state.fragments] == [digest_of(f, draw(f, 0)) & (2**64 - 1) for f in FRAGMENTS]
    assert len(list(at.run.store.root.glob("manifest-*"))) == 1
    wait_quiet(at.served)
    assert at.inbox() == []


def test_a_part_of_first_parameters_may_come_twice_also_after_the_last(at: Rig) -> None:
    a = at.island("a")
    seeds = {fragment: draw(fragment, 0) for fragment in FRAGMENTS}
    for fragment in (FRAGMENT, OTHER):
        assert [a.push(fragment, seeds[fragment], seed=True).duplicate for _ in range(2)] == [False, True]
    with pytest.raises(Conflict):
        a.push(FRAGMENT, -seeds[FRAGMENT], seed=True)
    assert [a.push(STATIC, seeds[STATIC], seed=True).duplicate for _ in range(2)] == [False, True]
    with pytest.raises(StaleEpoch, match="has its first parameters already: fetch them"):
        a.push(FRAGMENT, seeds[FRAGMENT], seed=True, rank=1)


def test_only_the_chosen_island_seeds_and_only_once(at: Rig) -> None:
    a, b = at.island("a"), at.island("b")
    with pytest.raises(Malformed, match="first parameters are to come from a, not from b"):
        b.push(FRAGMENT, draw(FRAGMENT, 0), seed=True)
    seed(a)
    with pytest.raises(StaleEpoch, match="has its first parameters already: fetch them"):
        b.push(FRAGMENT, draw(FRAGMENT, 0), seed=True)


def test_a_seeder_that_comes_back_starts_over(at: Rig) -> None:
    a = at.island("a")
    a.push(FRAGMENT, -draw(FRAGMENT, 0), seed=True)
    a.join()
    seed(a)
    assert torch.equal(floats(a.fetch(FRAGMENT, anchor=True)[1]), draw(FRAGMENT, 0))


# -- contributions and updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_contributions_in_parts_become_an_update_that_leads_to_the_next_anchor(make: Make, down: str) -> None:
    at = make(f'wire.down="{down}"', "rounds.start_islands=2", "rounds.quorum=2")
    a, b = at.started("a", "b")
    before = at.served.ask(lambda run: run.outers[0].copy())
    mine, theirs = draw(FRAGMENT, 1), draw(FRAGMENT, 2)
    assert not a.push(FRAGMENT, mine, LEFT, rank=0, tokens=300).dropped
    assert not b.push(FRAGMENT, theirs, tokens=100).dropped
    assert a.beat().fragments[0].waiting_for.startswith("1 more contributions (a)")
    assert not a.push(FRAGMENT, mine, RIGHT, rank=1, tokens=300).dropped

    sent = {"a": [part(FRAGMENT, mine)], "b": [part(FRAGMENT, theirs)]}
    shares = {"a": 0.75, "b": 0.25}
    expected, update = fold(FRAGMENT, before, sent, shares, CONFIG.outer, CODECS[down])
    header, _ = a.fetch(FRAGMENT, [])
    assert (header.outcome, header.version) == ("committed", 1)
    assert header.reason == "all 2 active islands have contributed"
    assert header.digest == expected.digest & (2**64 - 1)
    assert (header.codec_id, header.codec_version) == (CODECS[down].id, 1)
    steps = torch.empty(FRAGMENT.numel)
    CODECS[down].decode(update, steps)
    for pieces in (LEFT, RIGHT):
        _, received = a.fetch(FRAGMENT, pieces, CODECS[down])
        assert torch.equal(received, payload(FRAGMENT, steps, pieces, CODECS[down]))
    assert torch.equal(floats(b.fetch(FRAGMENT, anchor=True)[1]), expected.anchor)
    assert senders(at) == ["a", "a", "b"]


def test_a_part_that_comes_twice_gets_the_same_receipt_and_counts_once(at: Rig) -> None:
    a, b = at.started("a", "b")
    for duplicate in (False, True, True):
        receipt = a.push(FRAGMENT, draw(FRAGMENT, 1), LEFT, rank=0)
        assert (receipt.duplicate, receipt.dropped) == (duplicate, "")
    assert len(at.inbox()) == 1
    a.push(FRAGMENT, draw(FRAGMENT, 1), RIGHT, rank=1)
    assert a.push(FRAGMENT, draw(FRAGMENT, 1), RIGHT, rank=1).duplicate
    assert len(at.inbox()) == 2
    b.push(FRAGMENT, draw(FRAGMENT, 1))
    assert a.fetch(FRAGMENT)[0].outcome == "committed"
    assert [i.contributions for i in a.link.status().islands] == [1, 1]


def test_other_bytes_under_the_same_key_are_a_conflict_and_the_first_stay(at: Rig) -> None:
    a, b = at.started("a", "b")
    a.push(FRAGMENT, draw(FRAGMENT, 1), LEFT, rank=0)
    kept = at.inbox()
    with pytest.raises(Conflict, match=r"rank 0 has sent [0-9a-f]{32} before and sends [0-9a-f]{32} now"):
        a.push(FRAGMENT, draw(FRAGMENT, 2), LEFT, rank=0)
    same_bytes = [Piece(EMBED, Box((0, 1), (6, 1))), LEFT[1]]
    shifted = draw(FRAGMENT, 1).clone()
    shifted[1:24:4] = shifted[0:24:4]
    with pytest.raises(Conflict):
        a.push(FRAGMENT, shifted, same_bytes, rank=0)
    assert at.inbox() == kept
    a.push(FRAGMENT, draw(FRAGMENT, 1), RIGHT, rank=1)
    b.push(FRAGMENT, draw(FRAGMENT, 1))
    _, received = a.fetch(FRAGMENT, LEFT)
    torch.testing.assert_close(floats(received), floats(payload(FRAGMENT, first_step(draw(FRAGMENT, 1)), LEFT)))


def test_a_late_contribution_is_answered_with_the_reason_and_recorded(make: Make) -> None:
    at = make("rounds.start_islands=2", "rounds.quorum=1", "rounds.grace_s=20.0")
    a, b = at.started("a", "b")
    a.push(FRAGMENT, draw(FRAGMENT, 1))
    at.tick(20)
    header, _ = b.fetch(FRAGMENT)
    assert header.reason == "1 contributed and b did not within 20 s of the first"
    receipt = b.push(FRAGMENT, draw(FRAGMENT, 2))
    assert (receipt.duplicate, receipt.dropped) == (False, "late: round 0 has ended, round 1 is open")
    assert [(i.contributions, i.dropped) for i in b.link.status().islands] == [(1, 0), (0, 1)]
    assert senders(at) == ["a"]


def test_a_contribution_that_is_not_finite_is_dropped_and_the_round_goes_on(at: Rig) -> None:
    a, b, c = at.started("a", "b", "c")
    bad = draw(FRAGMENT, 1)
    bad[FRAGMENT.starts[2]] = torch.inf
    a.push(FRAGMENT, bad, LEFT[:1], rank=0)
    why = f"tensor {WEIGHT} of the contribution has values that are not finite or beyond 1e+18"
    assert a.push(FRAGMENT, bad, LEFT[1:], rank=1).dropped == why
    assert a.push(FRAGMENT, bad, RIGHT, rank=2).dropped == why
    assert len(at.inbox()) == 1
    b.push(FRAGMENT, draw(FRAGMENT, 1))
    c.push(FRAGMENT, draw(FRAGMENT, 1))
    header, received = b.fetch(FRAGMENT)
    assert (header.outcome, header.reason) == ("committed", "all 2 active islands have contributed")
    torch.testing.assert_close(floats(received), first_step(draw(FRAGMENT, 1)))
    assert [(i.contributions, i.dropped) for i in b.link.status().islands] == [(0, 1), (1, 0), (1, 0)]
    assert senders(at) == ["a", "b", "c"]


def test_an_island_that_comes_back_sends_the_rest_again_and_counts_once(at: Rig) -> None:
    a, b = at.started("a", "b")
    a.push(FRAGMENT, -draw(FRAGMENT, 1), LEFT, rank=0)
    [orphan] = at.inbox()
    a.join()
    a.push(FRAGMENT, draw(FRAGMENT, 1), RIGHT, rank=1)
    assert orphan not in at.inbox()
    a.push(FRAGMENT, draw(FRAGMENT, 1), LEFT, rank=0)
    a.join()
    again = a.push(FRAGMENT, draw(FRAGMENT, 9))
    assert again.dropped == "a has already contributed to round 0 under another epoch"
    assert len(at.inbox()) == 2
    b.push(FRAGMENT, draw(FRAGMENT, 1))
    _, received = b.fetch(FRAGMENT, LEFT)
    torch.testing.assert_close(floats(received), floats(payload(FRAGMENT, first_step(draw(FRAGMENT, 1)), LEFT)))


def test_a_fetch_of_an_open_round_waits_so_long_and_says_what_the_round_waits_for(at: Rig) -> None:
    a, _ = at.started("a", "b")
    a.push(FRAGMENT, draw(FRAGMENT, 1))
    begin = time.monotonic()
    header, received = a.fetch(FRAGMENT, wait_s=0.05)
    assert time.monotonic() - begin >= 0.05
    assert (header.outcome, header.reason) == ("open", "1 more contributions (b), for at most 600 s more")
    assert received.numel() == 0


def test_a_fetch_that_waits_is_answered_when_the_round_ends(at: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = at.started("a", "b")
    waiting, update = Event(), Run.update

    async def seen(*args: Any) -> Any:
        waiting.set()
        return await update(*args)

    monkeypatch.setattr(Run, "update", seen)
    a.push(FRAGMENT, draw(FRAGMENT, 1))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(a.fetch, FRAGMENT)
        assert waiting.wait(BOUND_S)
        b.push(FRAGMENT, draw(FRAGMENT, 2))
        assert answer.result(BOUND_S)[0].outcome == "committed"


def test_a_skipped_round_has_no_update(at: Rig) -> None:
    a, b = at.started("a", "b")
    a.push(FRAGMENT, draw(FRAGMENT, 1))
    for _ in range(60):
        at.clock.now += 10
        a.beat(), b.beat()
    header, received = a.fetch(FRAGMENT)
    why = "1 of the quorum of 2 contributed within the deadline of 600 s"
    assert (header.outcome, header.reason, header.version) == ("skipped", why, 0)
    assert received.numel() == 0
    assert a.link.status().rounds_skipped == 1
    assert senders(at) == []
    a.push(FRAGMENT, draw(FRAGMENT, 1), round=1)
    b.push(FRAGMENT, draw(FRAGMENT, 1), round=1)
    assert a.fetch(FRAGMENT, round=1)[0].version == 1


def test_old_updates_are_no_longer_kept(make: Make) -> None:
    at = make("run.steps=100")
    [a] = at.started("a")
    for round_ in range(UPDATES_KEPT + 1):
        a.push(FRAGMENT, draw(FRAGMENT, round_), round=round_, base_version=round_)
        assert a.fetch(FRAGMENT, round=round_)[0].version == round_ + 1
    assert a.fetch(FRAGMENT, round=1)[0].version == 2
    with pytest.raises(DilocoError, match="the update of round 0 is no longer kept: fetch anchors"):
        a.fetch(FRAGMENT, round=0)


def test_after_its_last_round_a_fragment_stays_as_it_is(make: Make) -> None:
    at = make("run.steps=4")
    [a] = at.started("a")
    for fragment in (FRAGMENT, OTHER):
        a.push(fragment, draw(fragment, 1))
        a.fetch(fragment)
    assert a.beat().phase == "done"
    with pytest.raises(Malformed, match="round 1 of fragment 0 is not open: the fragment's last is round 0"):
        a.push(FRAGMENT, draw(FRAGMENT, 2), round=1, base_version=1)
    assert [f.version for f in a.beat().fragments] == [1, 1, 0]


# -- size, ports and restarts ---------------------------------------------------------------------------------------


def test_a_tensor_larger_than_any_message_passes_in_chunks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((coordinator.service, "OPTIONS"), (island.link, "_OPTIONS")):
        limits = {key: 65536 for key, _ in getattr(module, name) if key.endswith("message_length")}
        assert len(limits) == 2
        monkeypatch.setattr(module, name, [*({**dict(getattr(module, name)), **limits}).items()])
    monkeypatch.setattr("diloco.lane.CONTROL_LIMIT_BYTES", 65536)
    at = make('sync.strategy="whole"', "sync.fragments=1", "wire.chunk_bytes=16384")
    layout = Layout([TensorSpec("w", (300, 512)), TensorSpec("b", (7,))])
    [fragment] = partition(layout, at.run.config.sync)
    a = at.visitor("a", layout)
    a.join()
    with pytest.raises(Malformed, match=r"no frame \(kind 2, \d+ bytes\)"):
        a.push(fragment, draw(fragment, 0), seed=True)
    a.chunk_bytes = 16384
    a.push(fragment, draw(fragment, 0), seed=True)
    assert torch.equal(floats(a.fetch(fragment, anchor=True)[1]), draw(fragment, 0))
    a.beat(ready=True)
    a.push(fragment, draw(fragment, 1))
    header, received = a.fetch(fragment)
    assert header.total_bytes > 9 * 65536
    torch.testing.assert_close(floats(received), 0.7 * 1.9 * draw(fragment, 1))


def test_a_port_in_use_is_an_environment_fault_that_names_it(at: Rig, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address in (at.address, f"127.0.0.1:{taken.getsockname()[1]}"):
            with (
                pytest.raises(EnvironmentFault, match=rf"cannot listen on {address}: .*--listen HOST:PORT"),
                serving(CONFIG, tmp_path / "other", listen=address),
            ):
                pass
    with serving(CONFIG, tmp_path / "other"):
        pass


def test_coordinators_of_one_process_are_strangers(at: Rig, tmp_path: Path) -> None:
    at.island("a")
    with serving(configure(run_id="other"), tmp_path / "other") as other, visit(other.address, "a") as a:
        assert a.join().run_id == "other"
        assert a.link.status().run_id == "other"
        a.leave("finished")
    assert [i.state for i in at.visitor("b").link.status().islands] == ["JOINING"]


def test_a_coordinator_started_again_goes_on_where_its_snapshot_stands(tmp_path: Path) -> None:
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack)
        a, b = at.started("a", "b")
        updates = []
        for round_ in range(2):
            for visitor in (a, b):
                visitor.push(FRAGMENT, draw(FRAGMENT, round_), round=round_, base_version=round_)
            updates.append(a.fetch(FRAGMENT, round=round_))
        a.push(OTHER, draw(OTHER, 1))
        before = a.beat()
        anchors = [a.fetch(fragment, anchor=True)[1] for fragment in FRAGMENTS]
        epoch = a.identity.epoch
    with ExitStack() as stack:
        at = Rig(CONFIG, tmp_path, stack)
        a, b = at.visitor("a"), at.visitor("b")
        a.identity.run_id, a.identity.epoch = "test", epoch
        assert a.beat().fragments == before.fragments
        reply = a.join()
        assert reply.epoch == epoch + 2
        with pytest.raises(StaleEpoch, match=rf"no lease under epoch {epoch} \(a newer lease has epoch {epoch + 2}\)"):
            a.fetch(FRAGMENT, anchor=True, epoch=epoch)
        assert [(f.version, f.round, f.digest) for f in reply.state.fragments] == [
            (f.version, f.round, f.digest) for f in before.fragments
        ]
        assert [f.version for f in reply.state.fragments] == [2, 0, 0]
        assert reply.state.seeder == ""
        for fragment, anchor in zip(FRAGMENTS, anchors, strict=True):
            assert torch.equal(a.fetch(fragment, anchor=True)[1], anchor)
        for round_ in range(2):
            header, received = a.fetch(FRAGMENT, round=round_)
            assert (header, received.tolist()) == (updates[round_][0], updates[round_][1].tolist())
        b.join()
        a.beat(ready=True), b.beat(ready=True)
        for visitor in (a, b):
            visitor.push(FRAGMENT, draw(FRAGMENT, 2), round=2, base_version=2)
        assert a.fetch(FRAGMENT, round=2)[0].version == 3
        assert a.link.status().rounds_committed == 3


def test_a_state_folder_of_other_settings_is_refused_with_both_digests(tmp_path: Path) -> None:
    with ExitStack() as stack:
        Rig(CONFIG, tmp_path, stack).started("a", "b")
    for other in (configure("outer.lr=0.1"), configure(run_id="other")):
        with pytest.raises(RunMismatch) as caught, serving(other, tmp_path):
            pass
        assert CONFIG.digest[:12] in caught.value.message
        assert other.digest[:12] in caught.value.message


def test_a_coordinator_that_cannot_store_an_update_waits_with_the_round_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Event()

    def full(*_: Any) -> Path:
        tried.set()
        raise OSError(28, "No space left on device")

    with ExitStack() as stack:
        at = Rig(configure(), tmp_path, stack)
        [a] = at.started("a")
        anchor = a.fetch(FRAGMENT, anchor=True)[1]
        monkeypatch.setattr(at.run.store.files, "create", full)
        a.push(FRAGMENT, draw(FRAGMENT, 1))
        assert tried.wait(BOUND_S)
        assert a.fetch(FRAGMENT, wait_s=0.0)[0].outcome == "open"
        assert torch.equal(a.fetch(FRAGMENT, anchor=True)[1], anchor)
        assert not at.served.ask(lambda run: run.failed.done())


def test_a_download_begins_with_the_window_of_the_islands_last_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    at = make()
    a, b = at.started("a", "b")
    begun: list[int] = []

    class Noted(Window):
        def __init__(self, chunk_bytes: int, begin_bytes: int = FIRST_BYTES) -> None:
            begun.append(begin_bytes)
            super().__init__(chunk_bytes, begin_bytes)
            self.bytes *= 3

    monkeypatch.setattr(bulk, "Window", Noted)
    for visitor in (a, a, b):
        visitor.fetch(FRAGMENT, anchor=True)
    assert begun == [FIRST_BYTES, 3 * FIRST_BYTES, FIRST_BYTES]
