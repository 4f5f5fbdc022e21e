"""Merging contributions: their weights, and the weighted mean in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping

from diloco.config import Weighting


def shares(tokens: Mapping[str, int], policy: Weighting) -> dict[str, float]:
    """Each contributing island's share of the mean, in the order of island ids.

    The divisor is what has arrived, never what was expected. `tokens` counts the tokens each island trained since it
    adopted the fragment's anchor; where nobody counted any, all weigh the same.

    Returns:
        island id -> share; the shares sum to 1. Iteration order is the order in which to add contributions, so the
        mean does not depend on the order of arrival.
    """
    weights = {island: 1 if policy == "uniform" else tokens[island] for island in sorted(tokens)}
    total = sum(weights.values())
    if not total:
        return {island: 1 / len(weights) for island in weights}
    return {island: weight / total for island, weight in weights.items()}
