"""A fresh placement: the best of a small portfolio, priced by the real split on recent samples.

Legend: K samples, E experts, G ranks. `samples_KE` are token counts of recent iterations (or predictions).

Static, EPLB's and the paper's placements are candidates too, and the split prices METRO's, the even and the home rule:
so on its samples the choice is never worse than any of those methods. A cheaper estimate than the real split does not
work: it cannot carry surplus round a ring, and picks bad plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moeless.policy.cost import CostModel
from moeless.policy.eplb import eplb
from moeless.policy.layout import Layout
from moeless.policy.placer import place
from moeless.policy.roofline import slowest_us
from moeless.policy.scaler import scale
from moeless.policy.seeds import packing, ring
from moeless.policy.types import EpShape, Floats, Ints, Placement, static_placement

# Bound on the split's local search while pricing; less than in the hot path, for speed.
PRICING_REPAIRS = 6


def as_counts(samples_KE: Sequence[Floats] | Floats | Ints) -> Ints:
    """Samples as whole tokens, int64 [K, E]; predictions may be fractions."""
    return np.rint(np.asarray(samples_KE)).astype(np.int64).reshape(len(samples_KE), -1)


def rank_times(placement: Placement, samples_KE: Ints, num_ranks: int, cost: CostModel) -> Floats:
    """Time of each rank in each sample under the split, [K, G] in us."""
    layout = Layout(placement, num_ranks)
    return np.array([slowest_us(counts_E, layout, cost, PRICING_REPAIRS) for counts_E in samples_KE])


def price(placement: Placement, samples_KE: Ints, num_ranks: int, cost: CostModel) -> float:
    """Mean time of the slowest rank over the samples, us."""
    return float(rank_times(placement, samples_KE, num_ranks, cost).max(1).mean())


def slowest_times(
    placement: Placement, samples_KE: Ints, num_ranks: int, cost: CostModel, limit: float = np.inf
) -> Floats | None:
    """Time of the slowest rank in each sample [K], us; None as soon as their mean is sure to exceed `limit`."""
    bounds = [cost.bound_us(counts_E, num_ranks) for counts_E in samples_KE]
    most = limit * len(samples_KE) - sum(bounds)
    layout = Layout(placement, num_ranks)
    times = []
    for counts_E, bound in zip(samples_KE, bounds, strict=True):
        times.append(max(slowest_us(counts_E, layout, cost, PRICING_REPAIRS)))
        most -= times[-1] - bound
        if most < 0:
            return None
    return np.array(times)


def weights_of(samples_KE: Ints, cost: CostModel) -> list[float]:
    """Mean time of each expert, a little above 0 so that unused experts still have an order."""
    weights: list[float] = (cost.expert_us(samples_KE).mean(0) + 1e-9).tolist()
    return weights


def candidates(
    history_KE: Ints, shape: EpShape, cost: CostModel, resident: Placement | None = None, cv_threshold: float = 0.2
) -> Iterator[Placement]:
    """The portfolio for the mean loads of `history_KE`, the likeliest best first, made as they are asked for.

    With `resident` replicas there is one more ring, that needs few copies.
    """
    weights = weights_of(history_KE, cost)
    if resident is not None and all(resident):
        yield ring(weights, shape, 2, resident)
    for most in dict.fromkeys((2, 3, shape.num_ranks)):
        yield ring(weights, shape, most)
    for most in dict.fromkeys((2, shape.num_ranks)):
        yield packing(weights, shape, most)
    yield static_placement(shape.num_experts, shape.num_ranks)
    tokens_E = history_KE.mean(0)
    if shape.num_slots % shape.num_ranks == 0 and shape.num_experts % shape.num_groups == 0:
        yield eplb(tokens_E, shape).placement
    copies = scale(tokens_E.tolist(), shape.num_slots, shape.num_ranks, cv_threshold)
    yield place(tokens_E.tolist(), copies, shape)
