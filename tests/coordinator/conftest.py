"""Coordinators that serve in this process, for as long as a test runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import Rig, configure


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a coordinator with some settings overridden."""
    with ExitStack() as stack:
        yield lambda *overrides: Rig(configure(*overrides), tmp_path / "state", stack)


@pytest.fixture
def at(make: Callable[..., Rig]) -> Rig:
    """A coordinator whose run needs two islands."""
    return make("rounds.start_islands=2", "rounds.quorum=2")
