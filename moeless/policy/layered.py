"""The balancer: one class for all methods, led by the switches of its `BalancerConfig`.

Legend: E experts, G ranks.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import assert_never

import numpy as np

from moeless.policy import two_speed
from moeless.policy.config import BalancerConfig
from moeless.policy.cost import CostModel
from moeless.policy.eplb import check_sizes, eplb
from moeless.policy.flow import balanced, metro
from moeless.policy.layout import Layout
from moeless.policy.placer import place, place_contiguous
from moeless.policy.roofline import roofline
from moeless.policy.scaler import scale
from moeless.policy.seeds import num_copies
from moeless.policy.split import even, home, oracle
from moeless.policy.types import EpShape, Floats, Ints, LayerPlan, Placement, moves, static_placement


class LayeredBalancer:
    """Implements `balancers.Balancer`; its state is one `LayerState` and one compiled layout a layer."""

    def __init__(self, config: BalancerConfig, shape: EpShape, slots: tuple[int, ...], cost: CostModel) -> None:
        """`slots` are the slots of each layer.

        Raises:
            UsageError, CapacityError: sizes that can't work.
        """
        self.config = config
        self.cost = cost
        self._shapes = [dataclasses.replace(shape, num_slots=num) for num in slots]
        if config.place == "eplb":
            for layer_shape in self._shapes:
                check_sizes(layer_shape)
        # Our plans are due at different iterations in different layers, so that no iteration bears them all.
        stagger = config.interval if config.place == "portfolio" else 0
        self._states = [
            two_speed.LayerState(
                target=self.initial(layer),
                window=deque(maxlen=config.window),
                next_plan=layer % max(1, stagger) + config.interval // 4,
                wait=config.interval,
            )
            for layer in range(len(slots))
        ]
        self._multiplicity: list[Ints | None] = [None] * len(slots)
        self._layouts: list[Layout | None] = [None] * len(slots)

    def initial(self, layer: int) -> Placement:
        """Static expert parallelism."""
        shape = self._shapes[layer]
        return static_placement(shape.num_experts, shape.num_ranks)

    def plan(self, iteration: int, layer: int, predicted_E: Floats | None, resident: Placement) -> LayerPlan:
        """See `Balancer.plan`."""
        state, config = self._states[layer], self.config
        if config.place == "portfolio":
            two_speed.update(state, iteration, predicted_E, resident, self._shapes[layer], self.cost, config)
        elif config.loads != "none" and iteration >= state.next_plan:
            loads_E = self._loads(state, predicted_E)
            if loads_E is not None and loads_E.any():
                state.target = self._place(layer, loads_E, resident)
                state.next_plan = iteration + max(1, config.interval)
        copies, drops = moves(resident, state.target)
        loads_E = self._loads(state, predicted_E) if len(copies) > 1 else None
        if loads_E is not None:
            loads = loads_E.tolist()
            copies.sort(key=lambda copy: (-loads[copy[0]] / len(state.target[copy[0]]), copy))
        return LayerPlan(state.target, tuple(copies), tuple(drops))

    def split(self, layer: int, counts_E: Ints, ready: Placement) -> Ints:
        """See `Balancer.split`."""
        layout = self._layouts[layer]
        if layout is None or layout.placement != ready:
            layout = Layout(ready, self._shapes[layer].num_ranks, self._multiplicity[layer])
            self._layouts[layer] = layout
        match self.config.split:
            case "home":
                return home(counts_E, layout)
            case "even":
                return even(counts_E, layout)
            case "balanced":
                return balanced(counts_E, layout)
            case "metro":
                return metro(counts_E, layout)
            case "roofline":
                return roofline(counts_E, layout, self.cost)
            case "oracle":
                return oracle(counts_E, layout)
            case other:
                assert_never(other)

    def observe(self, iteration: int, layer: int, counts_E: Ints, shares_EG: Ints) -> None:
        """See `Balancer.observe`."""
        if self.config.loads in ("none", "true"):
            return
        state = self._states[layer]
        state.window.append(np.array(counts_E, np.int64))
        if self.config.place == "portfolio" and counts_E.any():
            bound = self.cost.bound_us(counts_E, shares_EG.shape[1])
            layout = self._layouts[layer]
            ready = layout is not None and not moves(layout.placement, state.target)[0]
            state.watch(float(self.cost.rank_us(shares_EG).max()) / bound, self.config.drift, ready)

    def _loads(self, state: two_speed.LayerState, predicted_E: Floats | None) -> Floats | None:
        """The loads to plan from, for one iteration; None when nothing is known yet.

        The mean of the history stands in for a missing prediction. EPLB takes sums: whole numbers keep its ties.
        """
        if self.config.loads != "history" and predicted_E is not None:
            return np.asarray(predicted_E, float)
        if not state.window:
            return None
        total_E = np.asarray(np.sum(list(state.window), axis=0), float)
        return total_E if self.config.place == "eplb" else total_E / len(state.window)

    def _place(self, layer: int, loads_E: Floats, resident: Placement) -> Placement:
        """Scale and place one layer from its loads."""
        shape, config = self._shapes[layer], self.config
        if config.place == "eplb":
            plan = eplb(loads_E, shape)
            self._multiplicity[layer] = plan.multiplicity_EG
            self._layouts[layer] = None
            return plan.placement
        loads = loads_E.tolist()
        match config.scale:
            case "none":
                copies = [1] * shape.num_experts
            case "cv":
                copies = scale(loads, shape.num_slots, shape.num_ranks, config.cv_threshold, self._min_saving())
            case "eplb" | "time":
                copies = num_copies(loads, shape, shape.num_ranks)
            case other:
                assert_never(other)
        return place(loads, copies, shape, resident) if config.place == "warm" else place_contiguous(copies, shape)

    def _min_saving(self) -> float:
        """Tokens that a further replica has to take off the largest, for its copy to pay; 0 without that rule."""
        if not self.config.stop_when_unprofitable:
            return 0.0
        per_token = self.cost.alpha_us + self.cost.beta_us
        return self.cost.copy_us * self.config.copy_price / self.config.horizon / max(per_token, 1e-30)
