"""One rank of `moeless bench layers`: the same iterations under every balancer in turn, stage by stage.

Legend: L measured layers, I measured iterations, B balancers, S stages, W warm-up iterations, T tokens of all ranks,
K experts a token, E experts, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.bench.layers_experts import RandomExperts
from moeless.engine.calibrate import Calibration, calibrate, device_clock
from moeless.engine.ep import Control, RankGroup
from moeless.engine.expert_layers import ExpertLayers, ExpertSettings, build_expert_layers
from moeless.engine.expert_pool import ExpertPool
from moeless.engine.moe_block import STAGES
from moeless.policy.config import BALANCERS

COUNTED = ("warm", "cold", "late", "copies", "plan_changes")


@dataclass(frozen=True, kw_only=True)
class LayersJob:
    """What all ranks are told. `ids_LITK` is None to calibrate only."""

    weights: Path
    balancers: tuple[str, ...]
    ids_LITK: NDArray[np.int64] | None
    num_warmup: int
    num_slots: int | None
    foresee: bool
    cpu_clock: bool
    num_repeats: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank measured; the last five are the same on all ranks."""

    calibration: Calibration
    seconds_LIBS: NDArray[np.float64]
    rows_LIB: NDArray[np.int64]
    modelled_us_LIB: NDArray[np.float64]
    replicas_LIB: NDArray[np.int64]
    resident_LIB: NDArray[np.int64]
    """Slots in use on this rank."""
    counted_BC: NDArray[np.int64]
    """Sums over measured iterations of what `COUNTED` names."""


def measure(group: RankGroup, job: LayersJob) -> RankTimes:
    """Calibrate, then run all layers one after the other."""
    clock = time.thread_time if job.cpu_clock else device_clock(group.device)
    source = RandomExperts(job.weights)
    with torch.inference_mode():
        pool = ExpertPool(source, min(4, source.num_experts), group.device)
        calibration = calibrate(group, pool, clock)
        pool.close()
        num_layers, num_iterations = (0, 0) if job.ids_LITK is None else job.ids_LITK.shape[:2]
        run = _Run(group, job, source, calibration, clock, (num_layers, num_iterations - job.num_warmup))
        for layer in range(num_layers):
            run.layer(layer)
    return run.times()


class _Run:
    def __init__(
        self,
        group: RankGroup,
        job: LayersJob,
        source: RandomExperts,
        calibration: Calibration,
        clock: Callable[[], float],
        size: tuple[int, int],
    ) -> None:
        self.group, self.job, self.source, self.calibration, self.clock = group, job, source, calibration, clock
        num_layers, num_iterations = size
        size_LIB = (num_layers, max(0, num_iterations), len(job.balancers))
        self.seconds = np.zeros((*size_LIB, len(STAGES)))
        self.rows, self.modelled_us = np.zeros(size_LIB, np.int64), np.zeros(size_LIB)
        self.replicas, self.resident = np.zeros(size_LIB, np.int64), np.zeros(size_LIB, np.int64)
        self.counted = np.zeros((len(job.balancers), len(COUNTED)), np.int64)

    def layer(self, layer: int) -> None:
        """Measure one layer under all balancers, whose order turns with the iteration so that none is favoured."""
        job, group = self.job, self.group
        assert job.ids_LITK is not None
        stacks = [self._stack(name) for name in job.balancers]
        ids_ITK = torch.from_numpy(job.ids_LITK[layer])
        own = slice(group.rank * ids_ITK.shape[1] // group.size, (group.rank + 1) * ids_ITK.shape[1] // group.size)
        generator = torch.Generator().manual_seed(job.seed + group.rank)
        x_TH = torch.randn(own.stop - own.start, self.source.hidden, generator=generator)
        x_TH = x_TH.to(group.device, self.source.dtype)
        before = np.zeros_like(self.counted)
        for i, ids_TK in enumerate(ids_ITK):
            if i == job.num_warmup:
                for stack in stacks:
                    stack.pool.wait_idle()
                before = np.array([_counts(stack) for stack in stacks])
            counts_E = np.bincount(ids_TK.reshape(-1).numpy(), minlength=self.source.num_experts)
            own_ids_TK = ids_TK[own].to(group.device)
            for turn in range(len(stacks)):
                b = (i + turn) % len(stacks)
                self._begin(stacks[b], job.balancers[b], counts_E)
                if i < job.num_warmup:
                    _decide_only(stacks[b], x_TH, own_ids_TK)
                else:
                    self._time(stacks[b], x_TH, own_ids_TK, (layer, i - job.num_warmup, b))
        self.counted += np.array([_counts(stack) for stack in stacks]) - before
        for stack in stacks:
            stack.close()

    def times(self) -> RankTimes:
        """All that was measured."""
        return RankTimes(
            calibration=self.calibration,
            seconds_LIBS=self.seconds,
            rows_LIB=self.rows,
            modelled_us_LIB=self.modelled_us,
            replicas_LIB=self.replicas,
            resident_LIB=self.resident,
            counted_BC=self.counted,
        )

    def _stack(self, name: str) -> ExpertLayers:
        settings = ExpertSettings(balancer=name, cost=self.calibration.cost(), num_slots=self.job.num_slots)
        stack = build_expert_layers(None, [], self.source, self.group, settings, clock=self.clock)
        stack.load_initial()
        return stack

    def _begin(self, stack: ExpertLayers, name: str, counts_E: NDArray[np.int64]) -> None:
        """Meet all ranks and start an iteration; the bound's copies are free, so everybody waits for them."""
        config = BALANCERS[name]
        if config.needs_truth or (self.job.foresee and config.loads == "predicted"):
            stack.controller.foresee(0, counts_E)
        stack.begin_step(self.group.control(Control(time_us=time.monotonic_ns() // 1000)).time_us)
        if config.needs_truth:
            stack.pool.wait_idle()
            self.group.control(Control())

    def _time(self, stack: ExpertLayers, x_TH: torch.Tensor, ids_TK: torch.Tensor, at: tuple[int, int, int]) -> None:
        weights_TK = torch.full(ids_TK.shape, 1 / ids_TK.shape[1], dtype=x_TH.dtype, device=x_TH.device)
        rows = stack.pool.stats.rows_computed
        stack.timer.reset()
        stack.blocks[0](x_TH, ids_TK, weights_TK)
        self.rows[at] = stack.pool.stats.rows_computed - rows
        shares_EG = stack.controller.shares_EG
        stack.timer.seconds["compute"] = self._best_compute(stack, x_TH, shares_EG[:, self.group.rank].tolist())
        self.seconds[at] = [stack.timer.seconds[stage] for stage in STAGES]
        self.modelled_us[at] = self.calibration.cost().layer_us(shares_EG)
        self.replicas[at] = sum(map(len, stack.controller.placements[0]))
        self.resident[at] = stack.pool.resident_bytes // stack.pool.expert_bytes

    def _best_compute(self, stack: ExpertLayers, x_TH: torch.Tensor, counts_E: list[int]) -> float:
        """Least time of the compute stage over the layer itself and repetitions of the same counts.

        Whatever else runs on the machine slows one rank or another; a layer is its slowest rank, so without this it
        would be mostly noise.
        """
        best = stack.timer.seconds["compute"]
        rows_RH = x_TH[torch.arange(sum(counts_E), device=x_TH.device) % len(x_TH)]
        for _ in range(self.job.num_repeats - 1):
            begin = self.clock()
            stack.pool.compute(0, rows_RH, counts_E)
            best = min(best, self.clock() - begin)
        return best


def _decide_only(stack: ExpertLayers, x_TH: torch.Tensor, ids_TK: torch.Tensor) -> None:
    """A layer without its dispatch and computation: history and placements go on."""
    controller, group = stack.controller, stack.blocks[0].group
    controller.settle(0, group.exchange(controller.announce(0, x_TH, ids_TK)))
    controller.plan_ahead(0)


def _counts(stack: ExpertLayers) -> list[int]:
    return [getattr(stack.controller.meters, name) for name in COUNTED]
