"""Streams of one process send in turns: the first is not slowed down by others, and none is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.v1 import coordinator_pb2 as pb
from island.turns import Turns
from tests.support import BOUND_S, Rig, configure, part


def test_the_first_goes_and_then_the_next() -> None:
    turns, order = Turns(BOUND_S), list[str]()

    def second() -> None:
        assert later[0]()
        order.append("second")
        later[1]()

    with ExitStack() as stack:
        wait, done = stack.enter_context(turns.stream())
        later = stack.enter_context(turns.stream())
        thread = threading.Thread(target=second)
        thread.start()
        assert wait()
        order.append("first")
        done()
        thread.join(BOUND_S)
    assert order == ["first", "second"]


@pytest.mark.parametrize("how", ["done", "end"])
def test_whoever_leaves_out_of_turn_is_in_nobodys_way(how: str) -> None:
    turns = Turns(0.0)
    with turns.stream() as (wait, done), turns.stream() as (third, _):
        with turns.stream() as (_, gone):
            if how == "done":
                gone()
            assert (wait(), third()) == (True, False)
        done()
        assert third()


def test_a_stream_that_waits_sends_a_message_now_and_then() -> None:
    turns = Turns(0.0)
    with turns.stream(), turns.stream() as (wait, _):
        assert not wait()
        assert not wait()


def test_a_contribution_that_begins_later_comes_after_the_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        at = Rig(configure("sync.strategy=strided", "sync.fragments=2", "sync.every_steps=2"), tmp_path, stack)
        [a] = at.started("a")
        turns = a.link._turns = Turns(BOUND_S)
        begun = threading.Event()
        events, receipts = list[str](), dict[int, pb.Receipt]()

        def payload(fragment: int) -> Iterator[Tensor]:
            values = torch.zeros(at.run.fragments[fragment].numel).view(torch.uint8)
            half = values.numel() // 2
            yield values[:half]
            if not fragment:
                begun.set()
                with turns._changed:
                    assert turns._changed.wait_for(lambda: len(turns._streams) == 2, BOUND_S)
            events.append(f"rest of {fragment}")
            yield values[half:]

        def push(fragment: int) -> None:
            pieces = part(at.run.fragments[fragment], torch.zeros(at.run.fragments[fragment].numel), None).pieces
            header = a.header(fragment, pieces)
            receipts[fragment] = a.link.push(header, lambda: payload(fragment), 16)
            events.append(f"receipt of {fragment}")

        threads = [threading.Thread(target=push, args=(fragment,)) for fragment in range(2)]
        threads[0].start()
        assert begun.wait(BOUND_S)
        threads[1].start()
        for thread in threads:
            thread.join(BOUND_S)
        assert events.index("rest of 0") < events.index("rest of 1")
        assert receipts == {0: pb.Receipt(), 1: pb.Receipt()}
