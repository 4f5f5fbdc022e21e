"""Bytes on the wire, counted at the socket: what `docs/codecs.md` says they are, for every codec, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.certificates import Authority
from diloco.codec import CODECS
from diloco.config import load_run
from diloco.framing import FRAME_BYTES
from diloco.lane import HEAD_BYTES
from diloco.tls import TLS
from island.session import Session, join
from tests.support import serving

LEAST_BYTES = 256 * 1024
"""Of a payload: the headers of a call are then a small part."""
WIDTH = 4096
RUN = """
[run]
id = "wire"
steps = 1000
[sync]
every_steps = 1
[wire]
up = "{codec}"
down = "{codec}"
[rounds]
lease_s = 1000.0
"""
TLS_BYTES, TLS_EVERY, TLS_MESSAGE_BYTES = 22, 16 * 1024, 44
CALL_BYTES = 300
"""The name of a call, its header and its end."""


def on_the_wire(payload: int, chunk: int, secure: bool) -> int:
    """Bytes of a stream of so many bytes of payload, as stated."""
    messages = -(-payload // chunk)
    framed = payload + messages * (FRAME_BYTES + HEAD_BYTES) + CALL_BYTES
    return framed + (-(-framed // TLS_EVERY) * TLS_BYTES + messages * TLS_MESSAGE_BYTES if secure else 0)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    return Authority(tmp_path_factory.mktemp("tls")).issue("anybody")


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("codec", [*CODECS, "auto"])
def test_a_contribution_and_an_update_take_what_is_stated(codec: str, secure: bool, tls: TLS, tmp_path: Path) -> None:
    bits = CODECS.get(codec, CODECS["int4"]).size(WIDTH) * 8 / WIDTH
    rows = 1 + int(LEAST_BYTES * 8 / bits) // WIDTH
    model = nn.Linear(WIDTH, rows, bias=False)
    config = load_run(RUN.format(codec=codec), "the test").value
    files = tls if secure else None
    with (
        serving(config, tmp_path / "state", tls=files) as served,
        join(model, None, served.address, island_id="a", tls=files) as site,
    ):
        with torch.no_grad():
            model.weight.add_(1e-3)
        replica, chunk = site.replica, config.wire.chunk_bytes
        staged = replica.stage(0)
        sizes = replica.contribution_size(0), replica.update_size(replica.owned(0))
        assert min(sizes) >= LEAST_BYTES
        before = site.report()
        site.courier.contribute(0, 0, 0, staged, tokens=1, steps=1)
        between = site.report()
        site.courier.fetch_update(0, 0)
        after = site.report()
    counted = between[0] - before[0], after[1] - between[1]
    for size, bytes_ in zip(sizes, counted, strict=True):
        assert bytes_ == pytest.approx(on_the_wire(size, chunk, secure), rel=0.002)
        assert size < bytes_


def test_the_other_way_little_comes_back(tmp_path: Path) -> None:
    with serving(load_run(RUN.format(codec="fp32"), "the test").value, tmp_path / "state") as served:
        model = nn.Linear(WIDTH, 1024, bias=False)
        with join(model, None, served.address, island_id="a") as site:
            fetched = _back(site)
    assert fetched < 0.01 * 4 * WIDTH * 1024


def _back(site: Session) -> int:
    """Bytes received while a contribution is sent."""
    staged, before = site.replica.stage(0), site.report()
    site.courier.contribute(0, 0, 0, staged, tokens=1, steps=1)
    return site.report()[1] - before[1]
