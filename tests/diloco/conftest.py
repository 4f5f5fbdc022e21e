"""Tests of a replica that hold wherever its anchors are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.diloco import policy


@pytest.fixture(scope="module", params=[False, True], ids=["cpu", "device"])
def both_policies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the tests of a module with anchors on the CPU, and on the device of the parameters."""
    policy.on_device = request.param
    yield
    policy.on_device = False
