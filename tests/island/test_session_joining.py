"""What a session does when things fail while it joins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from island.courier import Courier
from tests.island.test_session_faults import Site, config


def disturb(monkeypatch: pytest.MonkeyPatch, name: str, first: Callable[[Callable[[], None]], None]) -> None:
    """Has the first call of a method of the courier, which it is given, go as `first` likes."""
    original, disturbed = getattr(Courier, name), []

    def method(self: Courier, fragment: int) -> None:
        if disturbed:
            return original(self, fragment)
        disturbed.append(fragment)
        return first(lambda: original(self, fragment))

    monkeypatch.setattr(Courier, name, method)


def test_first_parameters_whose_receipt_is_lost_with_the_coordinator_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        at = Site(config(4), tmp_path, stack)

        def lose_the_receipt(seed: Callable[[], None]) -> None:
            seed()
            at.kill()
            at.start()
            seed()

        disturb(monkeypatch, "seed", lose_the_receipt)
        site = at.join()
        assert (site.epoch, site.rejoins) == (1, 0)
        at.train(4)
        at.check(1)


def test_an_island_whose_lease_runs_out_while_it_joins_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        at = Site(config(4), tmp_path, stack)

        def come_too_late(seed: Callable[[], None]) -> None:
            at.expire()
            seed()

        disturb(monkeypatch, "seed", come_too_late)
        site = at.join()
        assert (site.epoch, site.rejoins) == (2, 1)
        at.train(4)
        at.check(1)
