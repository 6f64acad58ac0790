"""When to change a placement, and how far: plans that pay for the copies they cause.

Legend: K samples, E experts, G ranks.

Loading an expert takes longer than a layer, so a plan has two speeds: *now*, the split over what is loaded, is made
anew from true counts in every iteration; *soon*, the placement, changes only in steps that gain more time over the
iterations a replica is expected to live than its copy costs. A layer that found nothing to gain looks again after twice
as long; a layer whose recent time exceeds what its plan promised looks at once (the drift alarm).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from moeless.policy.config import BalancerConfig
from moeless.policy.cost import CostModel
from moeless.policy.improve import StepPrice, improve
from moeless.policy.portfolio import candidates, price
from moeless.policy.types import EpShape, Floats, Ints, Placement, moves

# Iterations whose mean is held against the promise.
_NUM_RECENT = 4

# Samples that stand for the new traffic after an alarm: the last few only.
_NUM_AFTER_ALARM = 6

# Steps of a routine plan, and of one that starts afresh.
_FEW_STEPS = 2
_MORE_STEPS = 4

# A layer looks again after at most this many intervals.
_MAX_BACKOFF = 8


@dataclass
class LayerState:
    """What a balancer remembers of one layer.

    Attributes:
        target: the placement wanted.
        window: the last observed counts [E] each.
        ratios: time over lower bound of the last iterations.
        promised: that ratio as the last plan expected it; None before the first plan.
        next_plan: the iteration of the next routine plan.
        wait: iterations from one routine plan to the next.
    """

    target: Placement
    window: deque[Ints]
    next_plan: int
    wait: int
    promised: float | None = None
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))

    def alarmed(self, drift: float) -> bool:
        """Whether the recent iterations took longer than the plan promised, by more than the share `drift`."""
        if self.promised is None or len(self.ratios) < _NUM_RECENT:
            return False
        return sum(self.ratios) / _NUM_RECENT > self.promised * (1 + drift)


def update(
    state: LayerState,
    iteration: int,
    predicted_E: Floats | None,
    resident: Placement,
    shape: EpShape,
    cost: CostModel,
    config: BalancerConfig,
) -> None:
    """Change `state.target` if it is time to look and a change pays.

    A prediction counts as one more sample: the newest. Without any history it is the only one.
    """
    alarmed = state.alarmed(config.drift)
    if not alarmed and iteration < state.next_plan:
        return
    samples_KE = _samples(state, predicted_E, _NUM_AFTER_ALARM if alarmed else config.num_samples)
    if samples_KE is None or not samples_KE.any():
        return
    afresh = alarmed or state.promised is None or config.needs_truth
    step_price = StepPrice(config.min_gain, config.copy_price * cost.copy_us / config.horizon)
    before = state.target
    state.target, time = replan(before, samples_KE, resident, shape, cost, step_price, afresh)
    state.promised = time / max(_mean_bound(samples_KE, shape, cost), 1e-30)
    if alarmed and state.target == before:
        # Nothing helps: take the level as it is, so that the alarm does not ring in every iteration.
        state.promised = max(state.promised, sum(state.ratios) / _NUM_RECENT)
    changed = afresh or state.target != before
    state.wait = config.interval if changed else min(2 * state.wait, _MAX_BACKOFF * config.interval)
    state.next_plan = iteration + state.wait
    state.ratios.clear()


def replan(
    current: Placement,
    samples_KE: Ints,
    resident: Placement,
    shape: EpShape,
    cost: CostModel,
    step_price: StepPrice,
    afresh: bool,
) -> tuple[Placement, float]:
    """A few steps from `current`; or, `afresh`, from the best of `current` and the portfolio, copies priced in.

    Returns the placement and its mean time on the samples in us.
    """
    if not afresh:
        return improve(current, samples_KE, shape, cost, _FEW_STEPS, step_price, resident)
    best, best_value = current, np.inf
    options = [current] + [align(option, resident, shape) for option in candidates(samples_KE, shape, cost)]
    good_enough = 1.002 * _mean_bound(samples_KE, shape, cost)
    for i, option in enumerate(options):
        copies, _ = moves(resident, option)
        value = price(option, samples_KE, shape.num_ranks, cost) + step_price.us_per_copy * len(copies)
        if value < best_value * (1 - step_price.min_gain * (i > 0)):
            best, best_value = option, value
        if best_value <= good_enough:
            break
    return improve(best, samples_KE, shape, cost, _MORE_STEPS, step_price, resident)


def align(placement: Placement, resident: Placement, shape: EpShape) -> Placement:
    """`placement` with its ranks renamed so that more of it is resident: ranks are alike, copies are not free.

    Greedy: the pair of ranks with most experts in common first (ties: lowest index). Ranks of different nodes are not
    alike, so with several nodes only ranks of the same position in the nodes' order are exchanged: none.
    """
    if shape.num_nodes > 1:
        return placement
    num_ranks = shape.num_ranks
    common = np.zeros((num_ranks, num_ranks), np.int64)
    for wanted, there in zip(placement, resident, strict=True):
        for rank in wanted:
            for other in there:
                common[rank, other] += 1
    name = [-1] * num_ranks
    for flat in np.argsort(-common, axis=None, kind="stable").tolist():
        rank, other = divmod(flat, num_ranks)
        if name[rank] < 0 and other not in name:
            name[rank] = other
    return tuple(tuple(sorted(name[rank] for rank in ranks)) for ranks in placement)


def _samples(state: LayerState, predicted_E: Floats | None, most: int) -> Ints | None:
    """The newest observations, thinned evenly to `most`, and the prediction; None if there are neither."""
    rows = list(state.window)
    if most == _NUM_AFTER_ALARM:
        rows = rows[-most:]
    picked = [rows[i] for i in np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)] if rows else []
    if predicted_E is not None:
        picked.append(np.rint(predicted_E).astype(np.int64))
    return np.stack(picked) if picked else None


def _mean_bound(samples_KE: Ints, shape: EpShape, cost: CostModel) -> float:
    return float(cost.expert_us(samples_KE).sum(1).mean()) / shape.num_ranks
