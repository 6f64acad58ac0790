"""One budget of slots shared over all layers: more where they save most time (CRAFT, arXiv 2603.28768).

Legend: K samples, E experts, L layers. Extras are slots beyond one an expert.

The first few extras of a layer do most of the work, so this buys memory rather than time: a layer that is balanced
already gets none, and what no layer has a use for is not given out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from moeless.errors import CapacityError
from moeless.policy.cost import CostModel
from moeless.policy.improve import StepPrice, improve
from moeless.policy.two_speed import best_start, thinned
from moeless.policy.types import EpShape, Ints, static_placement

# Extras that are tried, besides the uniform share.
_LADDER = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class SlotBudget:
    """Slots of each layer [L], and the predicted mean time of all layers together, shared out and uniform, in us."""

    slots: tuple[int, ...]
    predicted_us: float
    uniform_us: float


def share_slots(
    samples_LKE: Sequence[Ints], shape: EpShape, total_slots: int, cost: CostModel, num_samples: int = 16
) -> SlotBudget:
    """Share `total_slots` over the layers, steepest average gain first.

    The predicted time is never above that of the uniform share. `shape.num_slots` is not used.

    Raises:
        CapacityError: fewer slots than experts in all layers.
    """
    num_layers = len(samples_LKE)
    left = total_slots - num_layers * shape.num_experts
    if left < 0:
        raise CapacityError(
            f"{total_slots} slots cannot hold {shape.num_experts} experts in each of {num_layers} layers"
        )
    uniform = left // num_layers
    most = shape.num_experts * (shape.num_ranks - 1)
    ladder = sorted({n for n in (*_LADDER, uniform) if n <= min(left, most)} | {min(uniform, most)})
    times = [_times(thinned(samples_KE, num_samples), shape, ladder, cost) for samples_KE in samples_LKE]
    extras = [0] * num_layers
    while (step := _steepest(times, extras, ladder, left)) is not None:
        layer, num = step
        left -= num - extras[layer]
        extras[layer] = num
    predicted = sum(row[num] for row, num in zip(times, extras, strict=True))
    uniform_us = sum(row[min(uniform, most)] for row in times)
    if predicted > uniform_us:
        extras, predicted = [min(uniform, most)] * num_layers, uniform_us
    return SlotBudget(tuple(shape.num_experts + num for num in extras), predicted, uniform_us)


def _times(samples_KE: Ints, shape: EpShape, ladder: Sequence[int], cost: CostModel) -> dict[int, float]:
    """Mean time of a layer with each number of extras; never more with more, as a slot may stay empty."""
    times: dict[int, float] = {}
    best = float("inf")
    placement = static_placement(shape.num_experts, shape.num_ranks)
    for num in ladder:
        layer_shape = dataclasses.replace(shape, num_slots=shape.num_experts + num)
        start = best_start(placement, samples_KE, samples_KE, placement, layer_shape, cost, StepPrice())
        placement, time = improve(start, samples_KE, layer_shape, cost, steps=2)
        best = min(best, time)
        times[num] = best
    return times


def _steepest(
    times: Sequence[dict[int, float]], extras: Sequence[int], ladder: Sequence[int], left: int
) -> tuple[int, int] | None:
    """The layer and its new number of extras that gain most a slot, looking past flat steps; None if nothing gains."""
    best, found = 0.0, None
    for layer, (row, now) in enumerate(zip(times, extras, strict=True)):
        for num in ladder:
            if now < num <= now + left:
                gain = (row[now] - row[num]) / (num - now)
                if gain > best + 1e-9 * row[now]:
                    best, found = gain, (layer, num)
    return found
