"""Texts continued by a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import InputError
from island.model import generate
from tests.island.model.shapes import SMALL, filled, random_tokens


class Recorder(nn.Module):
    """Always says the last token plus one; keeps the lengths it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        assert not torch.is_grad_enabled()
        return 100.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()


def test_generate_slides_its_context() -> None:
    model = Recorder()
    text = generate(model, torch.tensor([7, 8]), length=5, temperature=1.0, seed=0, context=4)
    assert text.tolist() == [7, 8, 9, 0, 1, 2, 3]
    assert text.dtype == torch.int64
    assert model.seen == [2, 3, 4, 4, 4]


def test_generate_follows_its_seed() -> None:
    model, prompt = filled(SMALL), random_tokens(3)
    torch.manual_seed(0)
    first = generate(model, prompt, length=12, temperature=1.0, seed=5, context=8)
    torch.manual_seed(1)
    assert torch.equal(first, generate(model, prompt, length=12, temperature=1.0, seed=5, context=8))
    assert not torch.equal(first, generate(model, prompt, length=12, temperature=1.0, seed=6, context=8))


def test_generate_at_temperature_zero_takes_the_most_likely() -> None:
    model, prompt = filled(SMALL), random_tokens(3)
    text = generate(model, prompt, length=1, temperature=0.0, seed=0, context=8)
    assert text[-1] == model(prompt[None])[0, -1].argmax()


def test_generate_refuses_an_empty_prompt() -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        generate(filled(SMALL), torch.tensor([], dtype=torch.int64), 1, 1.0, 0, 8)
