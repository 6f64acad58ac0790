"""When to change a placement, and how far: plans that pay for the copies they cause.

Legend: K samples, E experts, G ranks.

Loading an expert takes longer than a layer, so a plan has two speeds: *now*, the split over what is loaded, is made
anew from true counts in every iteration; *soon*, the placement, changes only in steps that gain more time over the
iterations a replica is expected to live than its copy costs. A layer that found nothing to gain looks again after twice
as long, in the end from scratch; a layer whose time exceeds what its plan promised looks at once (the drift alarm).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from moeless.policy.config import BalancerConfig
from moeless.policy.cost import CostModel
from moeless.policy.improve import StepPrice, improve
from moeless.policy.portfolio import candidates, rank_times, slowest_times
from moeless.policy.types import EpShape, Floats, Ints, Placement, moves

# The alarm rings when the excess over the promise adds up to this, in shares of it, over two iterations at least:
# at once for a change of traffic, late for a small drift, rarely for noise (Page's cumulative sum test).
_EXCESS = 0.6

# Steps of a routine plan, and of one after an alarm or from scratch.
_FEW_STEPS = 2
_MORE_STEPS = 4

# A layer looks again after at most this many intervals.
_MAX_BACKOFF = 16


@dataclass
class LayerState:
    """What a balancer remembers of one layer.

    Attributes:
        target: the placement wanted.
        window: the last observed counts [E] each.
        promised: time over lower bound as the last plan expected it; None before the first plan.
        next_plan: the iteration of the next routine plan.
        wait: iterations from one routine plan to the next.
        patience: iterations of the split that may still pass before `target` is expected to be loaded.
        excess: the sum of the alarm.
        num_drifted: iterations that `excess` has been above 0.
        stable_since: the iteration of the first plan or the last alarm.
    """

    target: Placement
    window: deque[Ints]
    next_plan: int
    wait: int
    promised: float | None = None
    patience: int = 0
    excess: float = 0.0
    num_drifted: int = 0
    stable_since: int = 0

    def watch(self, ratio: float, drift: float, ready: bool) -> None:
        """Hold one iteration's time over its bound against the promise; patiently while copies are on their way.

        Args:
            ready: whether all of `target` took part in the split.
        """
        self.patience = 0 if ready else self.patience - 1
        if self.promised is None or self.patience > 0:
            return
        self.excess += ratio / self.promised - 1 - drift
        self.num_drifted += 1
        if self.excess <= 0:
            self.excess, self.num_drifted = 0.0, 0

    @property
    def alarmed(self) -> bool:
        """Whether the traffic has changed since the last plan."""
        return self.excess > _EXCESS and self.num_drifted > 1


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
    alarmed = state.alarmed
    if not alarmed and iteration < state.next_plan:
        return
    if alarmed:
        # What came before is other traffic: forget it.
        for _ in range(len(state.window) - state.num_drifted):
            state.window.popleft()
    history_KE = _history(state, predicted_E)
    if not history_KE.any():
        return
    if alarmed or state.promised is None:
        state.stable_since = iteration
    # After an alarm a few steps help at once, where a new start would keep all ranks copying for long.
    afresh = not alarmed and (state.promised is None or state.wait >= _MAX_BACKOFF * config.interval)
    # Traffic that has been stable for long is expected to stay so for as long again.
    horizon = max(config.horizon, iteration - state.stable_since)
    step_price = StepPrice(config.min_gain, config.copy_price * cost.copy_us / horizon, config.num_errors)
    before = state.target
    samples_KE = thinned(history_KE, config.num_samples)
    steps = 0 if config.needs_truth else _MORE_STEPS if afresh or alarmed else _FEW_STEPS
    state.target, time = improve(before, samples_KE, shape, cost, steps, step_price, resident)
    if afresh:
        start = best_start(state.target, history_KE, samples_KE, resident, shape, cost, step_price)
        if start != state.target:
            state.target, time = improve(start, samples_KE, shape, cost, steps, step_price, resident)
    state.promised = time / max(cost.bound_us(samples_KE, shape.num_ranks), 1e-30)
    # New traffic is looked at again soon, and again when twice as much is known of it.
    longest = config.interval if state.target != before else _MAX_BACKOFF * config.interval
    state.wait = config.interval // 4 if alarmed else min(max(1, 2 * state.wait), longest)
    state.patience = config.interval if state.target != before else 0
    state.next_plan = iteration + state.wait
    state.excess, state.num_drifted = 0.0, 0


def best_start(
    current: Placement,
    history_KE: Ints,
    samples_KE: Ints,
    resident: Placement,
    shape: EpShape,
    cost: CostModel,
    step_price: StepPrice,
) -> Placement:
    """The best of `current` and the portfolio for `history_KE` on the samples, copies priced in.

    A change has to gain what `step_price` asks of a step.
    """
    current_K = rank_times(current, samples_KE, shape.num_ranks, cost).max(1)
    num_copies = len(moves(resident, current)[0])
    best, best_value, best_K = current, float(current_K.mean()), current_K
    good_enough = 1.002 * cost.bound_us(samples_KE, shape.num_ranks)
    copies_cost = step_price.us_per_copy > 0
    seen = {current}
    for candidate in candidates(history_KE, shape, cost, resident if copies_cost else None):
        if best_value <= good_enough:
            break
        option = align(candidate, resident, shape) if copies_cost else candidate
        if option in seen:
            continue
        seen.add(option)
        due = step_price.us_per_copy * (len(moves(resident, option)[0]) - num_copies)
        option_K = slowest_times(option, samples_KE, shape.num_ranks, cost, limit=best_value - due)
        if option_K is not None and option_K.mean() + due < best_value:
            best, best_value, best_K = option, float(option_K.mean()) + due, option_K
    needed = step_price.num_errors * float((current_K - best_K).std()) / len(current_K) ** 0.5
    needed += step_price.min_gain * float(current_K.mean())
    return best if float(current_K.mean()) - best_value >= needed else current


def align(placement: Placement, resident: Placement, shape: EpShape) -> Placement:
    """`placement` with its ranks renamed so that more of it is resident: ranks are alike, copies are not free.

    Greedy: the pair of ranks with most experts in common first (ties: lowest index). With several nodes ranks are not
    alike, and keep their names.
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


def _history(state: LayerState, predicted_E: Floats | None) -> Ints:
    """The observations and, as the newest, the prediction, [K, E]; possibly none."""
    rows = list(state.window)
    if predicted_E is not None:
        rows.append(np.rint(predicted_E).astype(np.int64))
    return np.stack(rows) if rows else np.zeros((0, len(state.target)), np.int64)


def thinned(history_KE: Ints, most: int) -> Ints:
    """At most `most` rows, evenly spaced, the last among them."""
    num = len(history_KE)
    picked: Ints = history_KE[np.linspace(0, num - 1, min(most, num)).astype(int)]
    return picked
