"""Replay of recorded loads against a balancer: plan, copy, split, price, layer by layer, on a simulated clock.

The calls are those of the live engine in the same order (see `policy.balancers`), so a trace recorded by the engine
gives the plans that the engine made.

Legend: I iterations, L MoE layers, E experts, G ranks, d prediction distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.bench.simulate_loader import CopyEngines
from moeless.policy.balancers import Balancer
from moeless.policy.cost import CostModel
from moeless.policy.types import LayerPlan, Placement, num_replicas, static_placement
from moeless.trace.loads import LoadTrace

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How the simulated machine runs.

    Attributes:
        distance: layers ahead that a prediction is made.
        other_us: time between two MoE layers (attention and the rest), during which copies go on.
        free_copies: copies take no time and no bandwidth.
        cold_start: no expert is in memory at the beginning.
    """

    num_ranks: int
    slots_per_rank: int
    distance: int
    other_us: float
    free_copies: bool = False
    cold_start: bool = False


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What happened, per iteration and layer. Times in microseconds; counts of replicas, not bytes."""

    layer_us_IL: Floats
    bound_us_IL: Floats
    max_over_mean_IL: Floats
    replica_cv_IL: Floats
    """Coefficient of variation of the loads of replicas that had tokens."""
    replicas_IL: NDArray[np.int32]
    resident_I: NDArray[np.int64]
    """Replicas in memory over all layers and ranks."""
    copies_I: NDArray[np.int64]
    iteration_us_I: Floats
    num_warm: int
    num_cold: int
    num_late: int
    num_wasted: int
    peak_slots_per_rank: int
    placements: list[Placement]
    """The replicas wanted of each layer at the end."""


def replay(
    trace: LoadTrace,
    predicted_ILE: Floats | None,
    balancer: Balancer,
    cost: CostModel,
    settings: ReplaySettings,
    advance: Callable[[], None] = lambda: None,
) -> Replay:
    """Run all iterations of a trace.

    Args:
        predicted_ILE: predicted counts, NaN rows for layers without one; used if the balancer wants predictions.
        advance: called after every iteration, for a progress bar.
    """
    run = _Run(trace, predicted_ILE, balancer, cost, settings)
    for iteration in range(trace.num_iterations):
        run.step(iteration)
        advance()
    return run.finish()


def replay_plans(
    trace: LoadTrace, balancer: Balancer, distance: int, predicted_ILE: Floats | None = None
) -> list[list[LayerPlan]]:
    """The plans [iteration][layer] of a balancer on a trace when every copy is ready at once: what the engine decides.

    With `ready_ILEG` in the trace the splits use the replicas that were ready then.
    """
    num_layers = trace.num_layers
    resident = [balancer.initial(layer) for layer in range(num_layers)]
    plans: list[list[LayerPlan]] = []
    for i in range(trace.num_iterations):
        made: dict[int, LayerPlan] = {}
        for layer in range(num_layers):
            for target in _planned_at(layer, distance, num_layers):
                predicted = _prediction(trace, predicted_ILE, balancer, i, target)
                made[target] = balancer.plan(i, target, predicted, resident[target])
                resident[target] = made[target].placement
            counts_E = trace.counts_ILE[i, layer].astype(np.int64)
            shares_EG = balancer.split(layer, counts_E, _ready(trace, i, layer, resident[layer]))
            balancer.observe(i, layer, counts_E, shares_EG)
        plans.append([made[layer] for layer in range(num_layers)])
    return plans


def _ready(trace: LoadTrace, iteration: int, layer: int, resident: Placement) -> Placement:
    if trace.ready_ILEG is None:
        return resident
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in trace.ready_ILEG[iteration, layer])


def _planned_at(layer: int, distance: int, num_layers: int) -> list[int]:
    """The layers planned when `layer` is about to run: those no earlier layer can see at the start, else l + d."""
    first = list(range(min(distance, num_layers))) if layer == 0 else []
    return first + ([layer + distance] if layer + distance < num_layers else [])


def _prediction(
    trace: LoadTrace, predicted_ILE: Floats | None, balancer: Balancer, iteration: int, layer: int
) -> Floats | None:
    if balancer.config.needs_truth:
        return trace.counts_ILE[iteration, layer].astype(float)
    if predicted_ILE is None or balancer.config.loads != "predicted":
        return None
    row: Floats = predicted_ILE[iteration, layer]
    return None if np.isnan(row[0]) else row


class _Run:
    """The clock, the copies and the tallies of one replay."""

    def __init__(
        self,
        trace: LoadTrace,
        predicted_ILE: Floats | None,
        balancer: Balancer,
        cost: CostModel,
        settings: ReplaySettings,
    ) -> None:
        self.trace, self.predicted_ILE, self.balancer = trace, predicted_ILE, balancer
        self.cost, self.settings = cost, settings
        num_layers = trace.num_layers
        free = settings.free_copies or balancer.config.needs_truth
        self.copy_us = 0.0 if free else cost.copy_us
        wanted = [balancer.initial(layer) for layer in range(num_layers)]
        empty: Placement = ((),) * trace.num_experts
        self.copies = CopyEngines(
            [empty] * num_layers if settings.cold_start else wanted,
            wanted=wanted,
            num_ranks=settings.num_ranks,
            copy_us=self.copy_us,
            slots_per_rank=settings.slots_per_rank,
        )
        self.now_us = 0.0
        self.num_warm = self.num_cold = self.num_late = 0
        size = (trace.num_iterations, num_layers)
        self.layer_us_IL, self.bound_us_IL = np.zeros(size), np.zeros(size)
        self.max_over_mean_IL, self.replica_cv_IL = np.ones(size), np.zeros(size)
        self.replicas_IL = np.zeros(size, np.int32)
        self.resident_I, self.copies_I = np.zeros(size[0], np.int64), np.zeros(size[0], np.int64)
        self.iteration_us_I = np.zeros(size[0])

    def step(self, i: int) -> None:
        """One iteration."""
        trace, copies, distance = self.trace, self.copies, self.settings.distance
        started_us, copied = self.now_us, copies.num_copies
        shares_LEG = np.zeros((trace.num_layers, trace.num_experts, self.settings.num_ranks), np.int64)
        for layer in range(trace.num_layers):
            for target in _planned_at(layer, distance, trace.num_layers):
                predicted = _prediction(trace, self.predicted_ILE, self.balancer, i, target)
                plan = self.balancer.plan(i, target, predicted, copies.layers[target].wanted)
                copies.apply(target, plan, self.now_us)
            copies.advance(self.now_us)
            shares_LEG[layer], took_us = self._run_layer(i, layer)
            self.layer_us_IL[i, layer] = took_us
            self.now_us += took_us + self.settings.other_us
        self._tally(i, shares_LEG)
        self.copies_I[i] = copies.num_copies - copied
        self.resident_I[i] = copies.num_resident
        self.iteration_us_I[i] = self.now_us - started_us

    def _run_layer(self, i: int, layer: int) -> tuple[NDArray[np.int64], float]:
        """Split and price one layer; experts without any warm replica are loaded first, ranks side by side."""
        counts_E = self.trace.counts_ILE[i, layer].astype(np.int64)
        state = self.copies.layers[layer]
        wait_us = self._cold_starts(layer, counts_E) if () in state.usable else 0.0
        usable = state.usable
        if () in usable:  # an expert without tokens may be nowhere: give it a rank that gets nothing
            home = static_placement(len(usable), self.settings.num_ranks)
            usable = tuple(ranks or home[expert] for expert, ranks in enumerate(usable))
        shares_EG = self.balancer.split(layer, counts_E, usable)
        self.balancer.observe(i, layer, counts_E, shares_EG)
        self.replicas_IL[i, layer] = num_replicas(state.usable)
        if state.queued or state.in_flight:
            late = sum(g in state.wanted[e] for e, g in state.queued | state.in_flight)
            self.num_late += late
            self.num_warm += num_replicas(state.wanted) - late
        else:
            self.num_warm += num_replicas(state.wanted)
        if state.idle:
            state.idle = {(expert, rank) for expert, rank in state.idle if not shares_EG[expert, rank]}
        return shares_EG, self.cost.layer_us(shares_EG) + wait_us

    def _cold_starts(self, layer: int, counts_E: NDArray[np.int64]) -> float:
        """Load experts that have tokens and no warm replica on their home rank; the time the slowest rank needs."""
        state = self.copies.layers[layer]
        waits_us = [0.0] * self.settings.num_ranks
        for expert in np.flatnonzero(counts_E).tolist():
            if not state.warm[expert]:
                home = state.wanted[expert][0]
                waits_us[home] += self.copies.load_now(layer, expert, home, self.now_us)
                self.num_cold += 1
        return max(waits_us)

    def _tally(self, i: int, shares_LEG: NDArray[np.int64]) -> None:
        """Balance numbers of an iteration, for all layers at once."""
        rank_LG = shares_LEG.sum(1)
        mean_L, top_L = rank_LG.mean(1), rank_LG.max(1)
        np.divide(top_L, mean_L, out=self.max_over_mean_IL[i], where=mean_L > 0)
        active_L = (shares_LEG > 0).sum((1, 2))
        loads = shares_LEG.astype(float)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = loads.sum((1, 2)) / active_L
            variance = (loads**2).sum((1, 2)) / active_L - mean**2
            self.replica_cv_IL[i] = np.nan_to_num(np.sqrt(np.maximum(variance, 0)) / mean)
        counts_LE = self.trace.counts_ILE[i]
        self.bound_us_IL[i] = self.cost.expert_us(counts_LE).sum(-1) / self.settings.num_ranks

    def finish(self) -> Replay:
        """Everything tallied."""
        copies = self.copies
        return Replay(
            layer_us_IL=self.layer_us_IL,
            bound_us_IL=self.bound_us_IL + self.cost.latency_us * (self.bound_us_IL > 0),
            max_over_mean_IL=self.max_over_mean_IL,
            replica_cv_IL=self.replica_cv_IL,
            replicas_IL=self.replicas_IL,
            resident_I=self.resident_I,
            copies_I=self.copies_I,
            iteration_us_I=self.iteration_us_I,
            num_warm=self.num_warm,
            num_cold=self.num_cold,
            num_late=self.num_late,
            num_wasted=copies.num_wasted,
            peak_slots_per_rank=copies.peak_slots_per_rank,
            placements=[layer.wanted for layer in copies.layers],
        )
