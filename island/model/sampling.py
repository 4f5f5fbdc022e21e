"""Text continued by a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diloco.errors import InputError


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, length: int, temperature: float, seed: int, context: int) -> Tensor:
    """Continues `prompt` by `length` sampled tokens.

    Args:
        model: token ids [1, T] to logits [1, T, V].
        prompt: token ids [T], int64, at least one, on the model's device.
        length: tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        seed: of the sampling. The same arguments give the same tokens.
        context: the model sees at most this many of the last tokens.

    Returns:
        Token ids [T + length]: the prompt and its continuation.

    Raises:
        InputError: the prompt is empty.
    """
    if not len(prompt):
        raise InputError("the prompt is empty: give at least one token to continue from")
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[None, -context:])[0, -1].float().cpu()
        if temperature > 0:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, chosen.to(tokens.device)))
    return tokens
