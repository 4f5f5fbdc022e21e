"""Merging contributions: their weights, and the weighted mean in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping

from diloco.config import Weighting


def weight(policy: Weighting, *, tokens: int, steps: int, period: int) -> int:
    """What a contribution weighs before it is set against the others.

    Args:
        policy: "tokens": what was trained on; "uniform": one each, for whoever trained a whole period.
        tokens, steps: trained since the island adopted the fragment's anchor. 0 steps: not known, so a whole period.
        period: inner steps between two contributions to a fragment. Under "uniform" whoever came in the middle of it
            weighs by the steps it took, so a newcomer never dilutes a mean that it has not trained for.
    """
    return tokens if policy == "tokens" else min(steps, period) or period


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Each contribution's share of the mean, in the order of ids.

    The divisor is what has arrived, never what was expected. Where nobody weighs anything, all weigh the same.

    Returns:
        id -> share; the shares sum to 1. Iteration order is the order in which to add contributions, so the mean does
        not depend on the order of arrival.
    """
    ordered = {island: weights[island] for island in sorted(weights)}
    total = sum(ordered.values())
    if not total:
        return {island: 1 / len(ordered) for island in ordered}
    return {island: weight / total for island, weight in ordered.items()}
