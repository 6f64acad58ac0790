"""The expert layers of one model on one rank, put together: what the engine holds and steps.

layers = build_expert_layers(loaded.model, loaded.layers, store, group, balancer="moeless-roofline")
layers.begin_step(control.time_us)   # every rank, every step
model(...)                           # or, on a rank without tokens: layers.idle_step()
layers.end_step("decode", num_tokens=8)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from moeless.engine.calibrate import calibrate, device_clock
from moeless.engine.controller import ExpertController, Predictor
from moeless.engine.ep import RankGroup
from moeless.engine.expert_pool import ExpertPool
from moeless.engine.keep_alive import KeepAlive
from moeless.engine.moe_block import MoeBlock, StageTimer
from moeless.engine.residency import Residency
from moeless.engine.routed_experts import StepIds
from moeless.engine.verify import LayerVerifier
from moeless.errors import CapacityError
from moeless.models.expert_store import ExpertSource, expert_bytes
from moeless.models.family import MoeLayer
from moeless.policy.balancers import Balancer, make_balancer
from moeless.policy.config import BALANCERS, BalancerConfig
from moeless.policy.cost import TOKENS, CostModel, resident_gbs
from moeless.policy.types import EpShape
from moeless.trace.recorder import Recorder
from moeless.trace.routes import Phase

NUM_SPARE = 2
"""Slots a rank has beyond its plans, so that experts can change places."""


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """How experts are balanced and how much memory they may take; the same on every rank.

    Attributes:
        balancer: a key of `BALANCERS`, a configuration, or a balancer ready made. One rank has nothing to balance, and
            spends no time on it.
        cost: what plans are priced with; the same on all ranks. By default it is measured at the start, where the
            balancer's decisions depend on it.
        num_slots: replicas a layer may have over all ranks; by default one each, and one more a rank.
        budget_bytes: memory for experts on each rank; by default what `num_slots` takes in all layers, and two spare.
            Less than the experts need makes a slower engine, not a wrong one.
        distance: layers ahead that predictions are for.
        keep_alive_s: how long a replica that no plan wants stays without a token, in seconds of the shared clock.
        scale_to_zero: whether experts that no rank has a token for leave after that time, too, whatever plans want.
        verify: share of layer executions that are computed a second time and compared; see `LayerVerifier`.
    """

    balancer: str | BalancerConfig | Balancer = "moeless-roofline"
    cost: CostModel | None = None
    num_slots: int | None = None
    budget_bytes: int | None = None
    distance: int = 1
    keep_alive_s: float = 60.0
    scale_to_zero: bool = False
    verify: float = 0.0

    def shape(self, num_experts: int, num_ranks: int) -> EpShape:
        """Sizes of a layer. Raises `CapacityError` when there are fewer slots than experts."""
        most = num_experts * num_ranks
        slots = min(most, num_experts + num_ranks) if self.num_slots is None else self.num_slots
        return EpShape(num_experts=num_experts, num_ranks=num_ranks, num_slots=slots)

    def slots_per_rank(self, source: ExpertSource, shape: EpShape, group: RankGroup) -> int:
        """Slots of each rank for all layers. Raises `CapacityError` for a budget that no plan could work with."""
        num_layers = len(source.ffns)
        slots = num_layers * shape.slots_per_rank + NUM_SPARE
        if self.budget_bytes is not None:
            for_verify = expert_bytes(source) if self.verify else 0
            slots = ExpertPool.slots_within(source, self.budget_bytes - for_verify, group.device)
            if slots <= shape.slots_per_rank:
                raise CapacityError(
                    f"{self.budget_bytes:,} bytes hold {slots} experts, but a plan may put {shape.slots_per_rank} of "
                    "one layer on a rank, and one more is needed to move; give more memory or fewer slots a layer"
                )
        return min(slots, num_layers * shape.num_experts + NUM_SPARE)

    def make_verifier(self, source: ExpertSource, group: RankGroup) -> LayerVerifier | None:
        """What checks the share `verify` of executions, None for no share."""
        return LayerVerifier(source, self.verify, group.device) if self.verify else None

    def make_balancer(
        self, group: RankGroup, pool: ExpertPool, shape: EpShape, num_layers: int
    ) -> tuple[Balancer, CostModel]:
        """The balancer and its prices; all ranks call this together. Raises `UsageError` for an unknown name."""
        if not isinstance(self.balancer, str | BalancerConfig):
            return self.balancer, self.cost or TOKENS
        method = self.balancer if group.size > 1 else "static"
        config = BALANCERS.get(method) if isinstance(method, str) else method
        prices = config is not None and (config.scale == "time" or config.split == "roofline")
        cost = self.cost or (calibrate(group, pool, device_clock(pool.device)).cost() if prices else TOKENS)
        return make_balancer(method, shape, num_layers, cost), cost


class ExpertLayers:
    """The blocks of a model with what they share.

    Attributes:
        cost: what plans are priced with; the simulator needs it to make the same plans of a recorded trace.
        step_ids: the blocks' expert ids, of a step for which they are asked.
    """

    def __init__(
        self,
        blocks: list[MoeBlock],
        pool: ExpertPool,
        controller: ExpertController,
        timer: StageTimer,
        cost: CostModel,
        recorder: Recorder | None,
        clock: Callable[[], float],
    ) -> None:
        """Use `build_expert_layers`."""
        self.blocks, self.pool, self.controller, self.timer = blocks, pool, controller, timer
        self.cost = cost
        self.verifier, self.step_ids = blocks[0].verifier, blocks[0].step_ids
        self._recorder, self._clock = recorder, clock
        self._begin_s = self._metered_s = clock()

    def load_initial(self) -> None:
        """Load the experts of the initial placement and wait for them, if all fit in the ranks' memory together."""
        self.controller.load_initial()
        self.pool.wait_idle()

    def begin_step(self, time_us: int) -> None:
        """Start an iteration; `time_us` is the shared clock (`Control.time_us`)."""
        self._begin_s = self._meter()
        self.controller.begin_step(time_us)

    def rest(self, time_us: int) -> float:
        """There is nothing to run at `time_us` of the shared clock; see `ExpertController.rest`."""
        self._meter()
        return self.controller.rest(time_us)

    def idle_step(self) -> None:
        """Take part in every layer without tokens."""
        with torch.inference_mode():
            for block in self.blocks:
                block.idle()

    def end_step(self, phase: Phase, num_tokens: int) -> None:
        """End an iteration of `num_tokens` tokens over all ranks."""
        duration_s = self._clock() - self._begin_s
        for observer in (self._recorder, self.controller.traffic):
            if observer is not None:
                observer.end_iteration(phase=phase, num_tokens=num_tokens, duration_s=duration_s)

    def metrics(self) -> dict[str, Any]:
        """Plain numbers for reports; `pool` and times are this rank's, the rest is the same on all."""
        pool = self.pool
        self._meter()
        return {
            **self.controller.meters.as_dict(),
            "pool": {**vars(pool.stats), "num_slots": pool.num_slots, "resident_bytes": pool.resident_bytes},
            "stage_s": dict(self.timer.seconds),
            "cost": asdict(self.cost),
            "verify": None if self.verifier is None else asdict(self.verifier.stats),
        }

    def _meter(self) -> float:
        """Count up what was resident since the last time; the clock's time."""
        now_s = self._clock()
        gained = resident_gbs(1, (now_s - self._metered_s) * 1e6, self.pool.resident_bytes)
        self.controller.meters.resident_gb_s += gained
        self._metered_s = now_s
        return now_s

    def close(self) -> None:
        """Stop the loader; safe to call twice."""
        self.pool.close()


def build_expert_layers(
    model: PreTrainedModel | None,
    layers: Sequence[MoeLayer],
    source: ExpertSource,
    group: RankGroup,
    settings: ExpertSettings,
    *,
    predictors: Sequence[Predictor | None] = (),
    recorder: Recorder | None = None,
    clock: Callable[[], float] = time.perf_counter,
    pool: ExpertPool | None = None,
) -> ExpertLayers:
    """Make the expert layers and put them into `model` (None: nothing to put them into); every rank, same arguments.

    After a rank has died, the survivors do this again with their new group: the blocks take the place of the old ones,
    and of the old pool the experts stay that the new group's initial placement has here.

    Args:
        layers: the MoE layers of the model (`LoadedModel.layers`).
        predictors: see `ExpertController`.
        clock: of stage times and costs; never of plans.
        pool: the pool of the group before; it is closed where it cannot grow to the slots that are needed now.

    Raises:
        UsageError, CapacityError: sizes that cannot work.
    """
    num_layers, shape = len(source.ffns), settings.shape(source.num_experts, group.size)
    slots = settings.slots_per_rank(source, shape, group)
    residency = Residency(num_layers, source.num_experts, group.size, slots)
    if pool is None or not pool.grow(slots):
        if pool is not None:
            pool.close()
        pool = ExpertPool(source, slots, group.device, most_slots=num_layers * source.num_experts + NUM_SPARE)
    balancer, cost = settings.make_balancer(group, pool, shape, num_layers)
    controller = ExpertController(
        balancer,
        residency,
        pool,
        rank=group.rank,
        predictors=predictors,
        distance=settings.distance,
        keep_alive=KeepAlive(residency, settings.keep_alive_s, to_zero=settings.scale_to_zero),
        recorder=recorder,
    )
    timer, verifier, step_ids = StageTimer(clock), settings.make_verifier(source, group), StepIds()
    blocks = [MoeBlock(layer, pool, controller, group, timer, verifier, step_ids) for layer in range(num_layers)]
    if model is not None:
        for block, layer in zip(blocks, layers, strict=True):
            block.install(model, layer)
    return ExpertLayers(blocks, pool, controller, timer, cost, recorder, clock)
