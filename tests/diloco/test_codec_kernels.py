"""The compiled kernels and the eager definitions give the same bits; neither a compiler nor kernels are needed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import native
from diloco.codec.blocks import Blocked
from diloco.errors import CodecError
from tests.diloco.codecs import BLOCKED, eager, hard_values, same_bits

ROOT = Path(__file__).parents[2]
PROPERTY = settings(derandomize=True, deadline=None, max_examples=30)
built = pytest.mark.skipif(native.library is None, reason="the kernels are not built: python setup.py build_ext -i")


def outcome(codec: Blocked, payload: Tensor, numel: int) -> Tensor | None:
    """What a payload decodes to; None where it is refused."""
    try:
        return codec.unpack(payload, (numel,))
    except CodecError:
        return None


@built
@pytest.mark.parametrize("codec", BLOCKED.values(), ids=BLOCKED)
class TestSameBits:
    def test_has_a_kernel(self, codec: Blocked) -> None:
        assert codec.kernel is not None
        assert native.ENABLED

    @given(x=hard_values(most=20_000))
    @example(x=torch.ones(9000))
    @example(x=torch.arange(8192.0) % 100 - 50)
    @PROPERTY
    def test_of_payloads_and_values(self, codec: Blocked, x: Tensor) -> None:
        compiled = codec.pack(x)
        values = codec.unpack(compiled, x.shape)
        with eager():
            assert torch.equal(codec.pack(x), compiled)
            assert same_bits(codec.unpack(compiled, x.shape), values)

    @given(seed=st.integers(0, 2**31), blocks=st.integers(1, 3))
    @PROPERTY
    def test_of_any_bytes(self, codec: Blocked, seed: int, blocks: int) -> None:
        """Also of bytes that no encoder writes: both refuse them, or both decode them to the same bits."""
        size = codec.size(blocks * codec.block)
        noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        good = codec.pack(torch.randn(blocks * codec.block, generator=torch.Generator().manual_seed(seed)))
        for payload in (noise, torch.where(noise > 253, noise, good)):
            compiled = outcome(codec, payload, blocks * codec.block)
            with eager():
                plain = outcome(codec, payload, blocks * codec.block)
            assert (compiled is None) == (plain is None)
            assert compiled is None or plain is None or same_bits(compiled, plain)

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_on_any_number_of_threads(self, codec: Blocked, threads: int) -> None:
        x = torch.randn(2**19 + 77, generator=torch.Generator().manual_seed(threads))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            payload = codec.pack(x)
            values = codec.unpack(payload, x.shape)
        finally:
            torch.set_num_threads(before)
        with eager():
            assert torch.equal(codec.pack(x), payload)
            assert same_bits(codec.unpack(payload, x.shape), values)

    def test_in_several_threads_at_once(self, codec: Blocked) -> None:
        inputs = [torch.randn(2**18, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        payloads: dict[int, Tensor] = {}
        workers = [
            threading.Thread(target=lambda i=i, x=x: payloads.update({i: codec.pack(x)})) for i, x in enumerate(inputs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert all(torch.equal(payloads[i], codec.pack(x)) for i, x in enumerate(inputs))

    def test_nothing_beside_the_output_is_written(self, codec: Blocked) -> None:
        numel = 3 * codec.block + 5
        x = torch.randn(numel + 2)
        room = torch.full((codec.size(numel) + 64,), 77, dtype=torch.uint8)
        codec.encode(x[1:-1], room[32:-32])
        assert room[:32].eq(77).all() and room[-32:].eq(77).all()
        out = torch.full((numel + 2,), 5.0)
        codec.decode(room[32:-32], out[1:-1])
        assert (out[0], out[-1]) == (5.0, 5.0)
        assert torch.equal(out[1:-1], codec.unpack(codec.pack(x[1:-1]), (numel,)))


@built
def test_a_kernel_that_does_not_exist_is_refused() -> None:
    for arguments in (
        (9, 0, 0, 0, 0, 1),
        (-1, 0, 0, 0, 0, 1),
        (5, 0, 0, 0, 3, 1),
        (5, 0, 0, 0, 260, 1),
        (7, 0, 0, 0, 132, 1),
        (0, 0, 0, -1, 0, 1),
    ):
        with pytest.raises(ValueError, match="no such kernel"):
            native.library.encode(*arguments)


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_the_build_needs_no_compiler(compiler: str, tmp_path: Path) -> None:
    where = ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *where],
        cwd=ROOT,
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    made = [path.name for path in tmp_path.rglob("_kernels*") if path.suffix == ".so"]
    if compiler == "no-such-compiler":
        assert not made
        assert "no-such-compiler" in done.stderr + done.stdout
    elif native.library is not None:
        assert made == ["_kernels" + str(sysconfig.get_config_var("EXT_SUFFIX"))]
