"""Decides, layer by layer, where experts are and who computes which tokens; the same on every rank.

At layer l a rank contributes one row of integers: its true counts for l, its predicted counts for layer l+d, the states
of its slots of l, and how long its experts took in the layer that ran before. From all rows together each rank computes
the split of l (over the replicas that are ready) and the plan of l+d (whose loads start at once, in the background)
without any further word. Layers before d are planned at the start of the step, from history.

A layer's plan is made from its prediction; without one, from the loads seen before; without those it stays static. If
planning fails, the last good placement goes on serving.

Legend: T tokens, K experts a token, E experts, G ranks, C = 3E + 1 columns of the exchanged row, d prediction distance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.engine.expert_pool import ExpertPool
from moeless.engine.keep_alive import KeepAlive
from moeless.engine.meters import Meters
from moeless.engine.residency import Eviction, Residency
from moeless.engine.traffic import Traffic
from moeless.errors import CapacityError
from moeless.policy.balancers import Balancer
from moeless.policy.cost import billed_gbs
from moeless.policy.deal import deal_row
from moeless.policy.types import Ints, LayerPlan, Placement, from_mask
from moeless.trace.recorder import Recorder

Predictor = Callable[[torch.Tensor], torch.Tensor]
"""Router input of layer l [T, H] -> predicted expert ids of layer l+d [T, K]."""


class ExpertController:
    """See the module's head. The blocks of a model share one.

    Attributes:
        shares_EG: the division of the layer that was settled last.
    """

    def __init__(
        self,
        balancer: Balancer,
        residency: Residency,
        pool: ExpertPool,
        *,
        rank: int,
        predictors: Sequence[Predictor | None] = (),
        distance: int = 1,
        keep_alive: KeepAlive,
        recorder: Recorder | None = None,
    ) -> None:
        """Start from the balancer's initial placement, with no expert loaded (see `load_initial`).

        Args:
            predictors: one a layer, None where that layer has no prediction; a predictor is called with the router
                input of the layer `distance` before.
            keep_alive: over the same `residency`.
        """
        num_layers, self.num_experts, self.num_ranks = residency.held_LEG.shape
        self.meters = Meters()
        self.traffic = Traffic(num_layers, self.num_experts, self.num_ranks, rank, distance)
        self.lossy = balancer.config.lossy
        self.iteration = -1
        self._balancer, self._residency, self._pool, self._rank = balancer, residency, pool, rank
        self._predictors = list(predictors) or [None] * num_layers
        self._distance = distance
        self._keep_alive = keep_alive
        self._recorder = recorder
        self._now_us = 0
        self._placements = [balancer.initial(layer) for layer in range(num_layers)]
        self._last_run: tuple[int, float] | None = None
        self._planned_from: list[Ints | None] = [None] * num_layers
        self._predicted: list[Ints | None] = [None] * num_layers
        self._foreseen: dict[int, Ints] = {}
        self._planned_at = [0] * num_layers
        self._has_history = [False] * num_layers
        self._ready: list[tuple[bytes, Placement]] = [(b"", ())] * num_layers
        self.shares_EG: Ints = np.zeros((self.num_experts, self.num_ranks), np.int64)
        self._ready_EG = self._nothing_EG = np.zeros((self.num_experts, self.num_ranks), bool)
        for layer, placement in enumerate(self._placements):
            residency.want(layer, placement)

    @property
    def placements(self) -> list[Placement]:
        """The replicas wanted of each layer now."""
        return list(self._placements)

    def load_initial(self) -> None:
        """Ask for the experts of the initial placement, if all of them fit; otherwise they come when needed.

        Experts that a pool holds from an earlier group stay if they are among them.
        """
        fits = self._residency.keeps_last
        for layer, expert in self._pool.loaded():
            if not fits or self._rank not in self._placements[layer][expert]:
                self._pool.drop(layer, expert, give_back=True)
        if fits:
            for layer in range(len(self._placements)):
                self._load_missing(layer, LayerPlan(self._placements[layer]), None)

    def begin_step(self, time_us: int) -> None:
        """Start an iteration at `time_us` of the shared clock, and plan the layers that no layer can predict."""
        self.iteration += 1
        self.meters.iterations += 1
        self._now_us = time_us  # layers of one step are told apart by a microsecond each
        self._let_go(self._keep_alive.look(time_us))
        self._predicted = [self._foreseen.get(layer) for layer in range(len(self._placements))]
        self._foreseen = {}
        for layer in range(min(self._distance, len(self._placements))):
            self._plan(layer)

    def rest(self, time_us: int) -> float:
        """Between steps, at `time_us` of the shared clock: drop what keep-alive does not hold any more.

        Returns:
            Seconds until there may be more to drop, the same on every rank; see `KeepAlive.rest_s`.
        """
        self._let_go(self._keep_alive.look(time_us, is_idle=True))
        return self._keep_alive.rest_s(time_us)

    def foresee(self, layer: int, counts_E: Ints) -> None:
        """Predict the next step's counts of `layer` from outside; all ranks have to be told the same."""
        self._foreseen[layer] = counts_E

    def announce(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """This rank's row [C] for the exchange of `layer`."""
        num_experts = self.num_experts
        row_C = torch.zeros(3 * num_experts + 1, dtype=torch.int32, device=ids_TK.device)
        row_C[:num_experts] = torch.bincount(ids_TK.reshape(-1), minlength=num_experts)
        target = layer + self._distance
        predictor = self._predictors[target] if target < len(self._placements) else None
        if predictor is not None and len(x_TH):
            begin_s = time.perf_counter()
            predicted = predictor(x_TH).reshape(-1)
            row_C[num_experts : 2 * num_experts] = torch.bincount(predicted, minlength=num_experts)
            self.traffic.predictor.note(time.perf_counter() - begin_s)
        row_C[2 * num_experts : 3 * num_experts] = torch.from_numpy(self._pool.states(layer))
        row_C[3 * num_experts] = round(self._last_run[1] * 1e6) if self._last_run is not None else 0
        return row_C

    def settle(self, layer: int, table_GC: torch.Tensor) -> tuple[Ints, Ints]:
        """Divide the tokens of `layer` over its ready replicas; loads an expert that has none, if this is its home.

        Returns:
            What this rank sends of each expert to each rank [E, G], and what it gets from each rank of each [G, E].
        """
        num_experts, target = self.num_experts, layer + self._distance
        table = table_GC.numpy().astype(np.int64)
        counts_GE, states_GE = table[:, :num_experts], table[:, 2 * num_experts : 3 * num_experts]
        if self._last_run is not None:
            compute_s_G = table[:, 3 * num_experts] * 1e-6
            self.traffic.straggler[self._last_run[0]].note(float(compute_s_G.max() - compute_s_G.mean()))
        if target < len(self._placements) and self._predictors[target] is not None:
            self._predicted[target] = table[:, num_experts : 2 * num_experts].sum(0)
        for expert, rank in self._residency.confirm(layer, states_GE):
            self._carry_out([Eviction(layer, expert, rank)])
        counts_E = counts_GE.sum(0)
        ready = self._ready_replicas(layer, counts_E)
        shares_EG = self._split(layer, counts_E, ready)
        self._residency.touch(layer, shares_EG, self._now_us + layer)
        self.meters.warm += int(np.count_nonzero(shares_EG))
        self.traffic.note(layer, counts_GE, shares_EG, self._ready_EG, self._planned_from[layer])
        if self._recorder is not None:
            self._recorder.record_layer(layer, counts_GE, self._ready_EG, self._planned_from[layer])
        receive_EG = deal_row(np.ascontiguousarray(shares_EG.T), counts_GE.T, self._rank)
        return deal_row(counts_GE, shares_EG, self._rank), receive_EG.T

    def plan_ahead(self, layer: int) -> None:
        """Plan layer l+d, whose prediction came with the exchange of `layer`, and start its loads."""
        if layer + self._distance < len(self._placements):
            self._plan(layer + self._distance, busy=layer)

    def end_layer(self, layer: int, layer_s: float, stage_s: Mapping[str, float]) -> None:
        """Bill the replicas of `layer` that were live for its own time, of which the stages took `stage_s`."""
        live = int(np.count_nonzero(self._ready_EG))
        self.meters.layers_run += 1
        self.traffic.note_time(layer, layer_s, stage_s)
        self._last_run = layer, stage_s["compute"]
        self.meters.plan_age_sum += self.iteration - self._planned_at[layer]
        self.meters.billed_gb_s += billed_gbs(live, layer_s * 1e6, self._pool.expert_bytes)

    def _ready_replicas(self, layer: int, counts_E: Ints) -> Placement:
        """The replicas that `layer` runs on; every expert with tokens has one."""
        residency, placement = self._residency, self._placements[layer]
        wanted_EG = residency.wanted_LEG[layer]
        ready_EG = wanted_EG & residency.ready_LEG[layer]
        self.meters.late += int(np.count_nonzero(wanted_EG & residency.held_LEG[layer] & ~ready_EG))
        for expert in np.flatnonzero((counts_E > 0) & ~ready_EG.any(1)).tolist():
            lingering = np.flatnonzero(residency.ready_LEG[layer, expert])
            if len(lingering):
                rank = int(lingering[0])
            else:
                rank = self._start_cold(layer, expert, placement[expert][0], ready_EG & (counts_E > 0)[:, None])
            ready_EG[expert, rank] = True
        self._ready_EG = ready_EG
        key = ready_EG.tobytes()
        if self._ready[layer][0] != key:
            self._ready[layer] = (key, from_mask(ready_EG))
        return self._ready[layer][1]

    def _start_cold(self, layer: int, expert: int, home: int, busy_EG: NDArray[np.bool_]) -> int:
        """Load an expert while its layer waits: at home, or on the first rank with a slot to spare, which is given."""
        self._residency.wake(layer, expert)
        self.meters.cold += 1
        self.meters.warm -= 1  # it gets tokens, but was not there
        for rank in (home, *(rank for rank in range(self.num_ranks) if rank != home)):
            stamp_us = self._now_us + layer
            admitted, eviction = self._residency.admit(layer, expert, rank, stamp_us, (layer, busy_EG), must=True)
            self._carry_out([eviction] if eviction else [])
            if admitted:
                if rank == self._rank:
                    begin_s = time.perf_counter()
                    self._pool.load_now(layer, expert)
                    self.traffic.cold_start.note(time.perf_counter() - begin_s)
                return rank
        raise CapacityError(f"no rank has a slot for expert {expert} of MoE layer {layer}; give more expert memory")

    def _split(self, layer: int, counts_E: Ints, ready: Placement) -> Ints:
        """Tokens of each expert for each rank [E, G]; whole to first replicas if the balancer's division is wrong."""
        shares_EG = None
        if not self.lossy and self.num_ranks > 1:
            try:
                shares_EG = self._balancer.split(layer, counts_E, ready)
                if (shares_EG.sum(1) != counts_E).any():
                    raise ValueError("the shares are not the counts")
            except Exception as error:  # as for a plan: all ranks see the same failure
                self.meters.failed_splits += 1
                self.meters.last_error = f"splitting layer {layer} failed: {error!r}"
                shares_EG = None
        if shares_EG is None:
            shares_EG = np.zeros((self.num_experts, self.num_ranks), np.int64)
            with_tokens = np.flatnonzero(counts_E)
            shares_EG[with_tokens, [ready[e][0] for e in with_tokens]] = counts_E[with_tokens]
        self._balancer.observe(self.iteration, layer, counts_E, shares_EG)
        self._has_history[layer] |= bool(counts_E.any())
        self.shares_EG = shares_EG
        return shares_EG

    def _plan(self, layer: int, busy: int | None = None) -> None:
        """Plan `layer` and ask for its loads; `busy` is the layer that is about to run."""
        predicted_E = self._predicted[layer] if self._balancer.config.loads in ("predicted", "true") else None
        self._planned_from[layer] = predicted_E
        try:
            given = None if predicted_E is None else predicted_E.astype(float)
            plan = self._balancer.plan(self.iteration, layer, given, self._placements[layer])
        except Exception as error:  # whatever goes wrong in a balancer, the last good placement goes on serving
            self.meters.plans["failed"] += 1
            self.meters.last_error = f"planning layer {layer} failed: {error!r}"
            return
        uses_history = self._balancer.config.loads != "none" and self._has_history[layer]
        rung = "predicted" if predicted_E is not None else "history" if uses_history else "static"
        self.meters.plans[rung] += 1
        if plan.placement != self._placements[layer]:
            self._placements[layer] = plan.placement
            self._planned_at[layer] = self.iteration
            self.meters.plan_changes += 1
            self._residency.want(layer, plan.placement)
        self._load_missing(layer, plan, self._predicted[layer], busy)

    def _load_missing(self, layer: int, plan: LayerPlan, predicted_E: Ints | None, busy: int | None = None) -> None:
        """Ask for the replicas of `plan` that have no slot, in its order."""
        if predicted_E is not None:
            self._residency.wake(layer, predicted_E > 0)
        missing = self._residency.missing(layer, plan.copies)
        if not missing:
            return
        if not self._residency.keeps_last:  # no room for all: only what is going to be used, most used first
            if predicted_E is None:
                return
            missing = sorted((m for m in missing if predicted_E[m[0]] > 0), key=lambda m: (-predicted_E[m[0]], m))
        in_use = (layer, self._nothing_EG) if busy is None else (busy, self._ready_EG)
        for expert, rank in missing:
            admitted, eviction = self._residency.admit(layer, expert, rank, self._now_us + layer, in_use)
            self._carry_out([eviction] if eviction else [])
            self.meters.copies += admitted
            if admitted and rank == self._rank:
                self._pool.request(layer, expert)
        self.meters.refused = self._residency.num_refused

    def _let_go(self, expired: Sequence[Eviction]) -> None:
        self.meters.expired += len(expired)
        self._carry_out(expired, give_back=True)

    def _carry_out(self, evictions: Sequence[Eviction], *, give_back: bool = False) -> None:
        """Drop what was evicted here."""
        self.meters.evictions += len(evictions)
        for eviction in evictions:
            if eviction.rank == self._rank:
                self._pool.drop(eviction.layer, eviction.expert, give_back=give_back)
