"""A payload that is read while it is made: in order, again from the first, and no end before its maker says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from diloco.errors import DivergedError
from island.parcel import Parcel
from tests.support import BOUND_S


def piece(value: int) -> Tensor:
    return torch.full((3,), value, dtype=torch.uint8)


def test_readers_get_what_is_made_at_once_and_the_end_when_its_maker_is_done() -> None:
    go_on, parcel = threading.Event(), Parcel()

    def pieces() -> Iterator[Tensor]:
        yield piece(1)
        yield piece(2)
        assert go_on.wait(BOUND_S)

    with ThreadPoolExecutor(2) as pool:
        making = pool.submit(parcel.make, pieces)
        reader = parcel.read()
        assert [int(next(reader)[0]), int(next(reader)[0])] == [1, 2]
        rest = pool.submit(list, reader)
        assert not rest.done()
        go_on.set()
        assert rest.result(BOUND_S) == []
        making.result(BOUND_S)
    assert [int(p[0]) for p in parcel.read()] == [1, 2]


def test_an_error_ends_all_readers() -> None:
    parcel = Parcel()

    def pieces() -> Iterator[Tensor]:
        yield piece(1)
        raise DivergedError("not finite")

    with pytest.raises(DivergedError):
        parcel.make(pieces)
    with pytest.raises(DivergedError, match="not finite"):
        list(parcel.read())
