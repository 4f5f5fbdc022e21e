"""The eager definitions through torch.compile give the same bytes and bits, as other devices and compilers do."""

from __future__ import annotations

import pytest
import torch

from diloco.codec.blocks import Blocked
from tests.diloco.codecs import BLOCKED, golden_values, same_bits

TENSORS = {name: codec for name, codec in BLOCKED.items() if name != "topk-coded"}
"""Those whose definitions are tensors all through: `subsets` counts in Python's integers."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("codec", TENSORS.values(), ids=TENSORS)
def test_compiled_definitions_give_the_same_bits(codec: Blocked) -> None:
    values = golden_values()
    blocks = values[: len(values) // codec.block * codec.block].view(-1, codec.block).contiguous()
    records = codec.encode_blocks(blocks)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(codec.encode_blocks)(blocks), records)
    decoded = torch.compile(lambda r: codec.decode_blocks(r, codec.block))(records)
    assert same_bits(decoded, codec.decode_blocks(records, codec.block))
