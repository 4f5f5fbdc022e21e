"""Known answers of sparse contributions with error feedback (SparseLoCo, arXiv 2508.15706).

Two islands, parameters of 8 zeros, outer SGD of lr 1 on the sum of the contributions, a chunk of 4 of which the largest
is sent, and a residual that decays by 0.95. The values are of an independent implementation.
"""

from __future__ import annotations

import pytest
import torch

from coordinator.fold import Outer, Part, fold
from diloco.codec import CODECS
from diloco.codec.topk import TopK
from diloco.config import OuterConfig
from diloco.feedback import Ending, Fate, Feedback
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec

GRADIENTS = {"a": torch.linspace(0.1, 0.8, 8), "b": torch.linspace(0.8, 0.1, 8)}
PARAMETERS = [
    [-0.8, 0, 0, -0.4, -0.4, 0, 0, -0.8],
    [-0.8, -1.365, -0.585, -0.4, -0.4, -0.585, -1.365, -0.8],
    [-0.8, -1.365, -2.2965, -1.18, -1.18, -2.2965, -1.365, -0.8],
]
RESIDUALS = [
    [0.1, 0.2, 0.3, 0, 0.5, 0.6, 0.7, 0],
    [0.195, 0.39, 0, 0.4, 0.975, 1.17, 0, 0.8],
    [0.28525, 0.5705, 0.3, 0, 1.42625, 0, 0.7, 1.56],
]


def test_sparse_contributions_give_the_known_values() -> None:
    codec = TopK("sparse", 0, keep=1, value_bits=32, chunk=4)
    fragment = Fragment(0, (0,), (TensorSpec("w", (8,)),))
    outer = Outer.first(fragment, torch.zeros(8))
    feedback = {island: Feedback(0.95) for island in GRADIENTS}
    for parameters, residual in zip(PARAMETERS, RESIDUALS, strict=True):
        sent = {}
        for island, gradient in GRADIENTS.items():
            payload = torch.empty(codec.size(8), dtype=torch.uint8)
            feedback[island].begin(0)
            list(feedback[island].encode(0, gradient, codec, payload))
            sent[island] = [Part(pieces=[Piece(0, Box.whole((8,)))], codecs=[codec], payload=payload)]
            feedback[island].receipt(Fate.COUNTS)
            feedback[island].end(Ending.COMMITTED, 0.0)
        shares = dict.fromkeys(GRADIENTS, 1.0)
        outer, _ = fold(fragment, outer, sent, shares, OuterConfig(lr=1.0, momentum=0.0), CODECS["fp32"])
        assert outer.anchor.tolist() == pytest.approx(parameters, abs=1e-6)
        assert feedback["a"].residual(0, 8).tolist() == pytest.approx(residual, abs=1e-6)
        assert feedback["b"].residual(0, 8).flip(0).tolist() == pytest.approx(residual, abs=1e-6)
