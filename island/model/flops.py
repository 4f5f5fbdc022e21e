"""What a trained token costs, and how much of a device that is."""

from __future__ import annotations

from diloco.config import ModelConfig


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of one trained token, forward and backward: 6 N + 12 L H E T.

    N counts the weights of the matrix products: all but norms and the embedding lookup, with the output
    projection whether tied or not. The second term is attention's two products over the whole sequence,
    without a discount for causality (PaLM, arXiv 2204.02311, appendix B).
    """
    dim, q_dim, kv_dim = config.dim, config.heads * config.head_width, config.kv_heads * config.head_width
    per_layer = 2 * dim * (q_dim + kv_dim) + 3 * dim * config.ffn_dim
    weights = config.layers * per_layer + config.vocab_size * dim
    return 6 * weights + 12 * config.layers * q_dim * config.sequence_length
