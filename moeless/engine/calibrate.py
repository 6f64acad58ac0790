"""What an expert, a transfer and a load cost on this machine: the cost model's numbers, measured.

Times are by the clock that the layers are measured with. All ranks take part; rank 0's numbers are everybody's.

Legend: H hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from moeless.engine.ep import RankGroup, all_to_all
from moeless.engine.expert_pool import ExpertPool, PoolStats
from moeless.policy.cost import Cluster, CostModel

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_REPEATS = 5
_MOST_S = 3.0


@dataclass(frozen=True)
class Calibration:
    """Measured costs.

    Attributes:
        floor_us: time of an expert with a single token.
        alpha_us: time of one more token, where tokens are many.
        beta_us: time of one token received, there and back.
        latency_us: time of two all-to-alls of a single row.
        copy_bytes_per_s: rate of a cold start out of a warm page cache.
        memcpy_bytes_per_s: rate of copying the same bytes in memory.
        expert_us: (tokens, time) as measured.
    """

    floor_us: float
    alpha_us: float
    beta_us: float
    latency_us: float
    copy_bytes_per_s: float
    memcpy_bytes_per_s: float
    expert_bytes: int
    expert_us: tuple[tuple[int, float], ...]

    @property
    def cold_start_over_memcpy(self) -> float:
        """How much slower a cold start is than a memcpy of its bytes."""
        return self.memcpy_bytes_per_s / self.copy_bytes_per_s

    def cost(self) -> CostModel:
        """The cost model that plans are priced with."""
        return CostModel(
            floor_us=self.floor_us,
            alpha_us=self.alpha_us,
            beta_us=self.beta_us,
            latency_us=self.latency_us,
            expert_bytes=self.expert_bytes,
            copy_bytes_per_s=self.copy_bytes_per_s,
        )

    def cluster(self, num_ranks: int, num_parameters: int, hidden: int, activation_bytes: int) -> Cluster:
        """The same as rates, from which `cost_of` gives these costs again for experts of this shape."""
        return Cluster(
            num_ranks=num_ranks,
            memory_bytes_per_s=1e6 * self.expert_bytes / self.floor_us,
            flop_per_s=1e6 * 2 * num_parameters / self.alpha_us,
            link_bytes_per_s=1e6 * 2 * hidden * activation_bytes / max(self.beta_us, 1e-6),
            copy_bytes_per_s=self.copy_bytes_per_s,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a result file."""
        curve = [list(point) for point in self.expert_us]
        return {**asdict(self), "expert_us": curve, "cold_start_over_memcpy": self.cold_start_over_memcpy}


def calibrate(group: RankGroup, pool: ExpertPool, clock: Callable[[], float]) -> Calibration:
    """Measure on all ranks; every rank gets rank 0's result.

    Args:
        pool: a few experts of it are dropped, and their slots are free afterwards.
        clock: seconds; on CUDA it has to wait for the device.
    """
    beta_us, latency_us = _transfer_us(group, pool, clock)
    values = torch.zeros(6 + len(_TOKENS), dtype=torch.int64)  # exchanged in nanoseconds and bytes
    if group.rank == 0:  # alone, the others wait in the exchange
        experts = range(min(3, pool.num_slots, pool.num_experts))
        pool.wait_idle()
        for layer, expert in pool.loaded()[: len(experts)]:
            pool.drop(layer, expert)
        copy, memcpy = _load_rates(pool, experts)
        curve = _expert_curve(pool, experts, clock)
        for expert in experts:
            pool.drop(0, expert)
        pool.stats = PoolStats()
        floor_us, alpha_us = fit_roofline(_TOKENS, curve)
        times = [round(1e3 * us) for us in (floor_us, alpha_us, beta_us, latency_us, *curve)]
        values = torch.tensor([round(copy), round(memcpy), *times], dtype=torch.int64)
    copy_rate, memcpy_rate, *times = group.exchange(values)[0].tolist()
    floor_us, alpha_us, beta_us, latency_us = (max(ns, 1) / 1e3 for ns in times[:4])
    return Calibration(
        floor_us=floor_us,
        alpha_us=alpha_us,
        beta_us=beta_us,
        latency_us=latency_us,
        copy_bytes_per_s=copy_rate,
        memcpy_bytes_per_s=memcpy_rate,
        expert_bytes=pool.expert_bytes,
        expert_us=tuple((tokens, ns / 1e3) for tokens, ns in zip(_TOKENS, times[4:], strict=True)),
    )


def fit_roofline(tokens: tuple[int, ...], times_us: list[float]) -> tuple[float, float]:
    """(floor, alpha) of max(floor, alpha W) that come nearest to the measured times, relative errors counting alike.

    The floor is tried at each measured time; alpha follows from the sizes above the crossing.
    """
    sizes, times = np.array(tokens, float), np.array(times_us)
    best, fit = np.inf, (times[0], times[-1] / sizes[-1])
    for cut in range(1, len(sizes)):
        floor = float(np.exp(np.log(times[:cut]).mean()))
        alpha = float(np.exp(np.log(times[cut:] / sizes[cut:]).mean()))
        error = float((np.log(np.maximum(floor, alpha * sizes) / times) ** 2).sum())
        if error < best:
            best, fit = error, (floor, alpha)
    return fit


def _expert_curve(pool: ExpertPool, experts: range, clock: Callable[[], float]) -> list[float]:
    """Median time of one expert for each of `_TOKENS`, its weights out of the processor's caches.

    The other ranks wait meanwhile, so sizes that would take too long are extended from the last one that did not.
    """
    curve: list[float] = []
    deadline = time.monotonic() + _MOST_S
    for num_tokens in _TOKENS:
        if time.monotonic() > deadline and len(curve) > 1:
            curve.append(curve[-1] * num_tokens / _TOKENS[len(curve) - 1])
            continue
        rows = torch.randn(num_tokens, pool.hidden, device=pool.device).to(pool.dtype)
        times = []
        for repeat in range(_REPEATS + 1):
            expert = repeat % len(experts)
            begin = clock()
            pool.compute(0, rows, [0] * expert + [num_tokens])
            times.append(clock() - begin)
        curve.append(1e6 * statistics.median(times[1:]))
    return curve


def _load_rates(pool: ExpertPool, experts: range) -> tuple[float, float]:
    """Bytes a second of cold starts (warm page cache) and of copying as much in memory; the best, by wall clock."""
    cold, plain = [], []
    for repeat in range(_REPEATS):
        for expert in experts:
            if repeat:
                pool.drop(0, expert)
            begin = time.perf_counter()
            pool.load_now(0, expert)
            cold.append(time.perf_counter() - begin)
    slots = [pool.weights(0, expert) or {} for expert in experts]
    hosts = [{name: torch.empty(v.shape, dtype=v.dtype).copy_(v) for name, v in slot.items()} for slot in slots]
    for _ in range(_REPEATS):
        for slot, host in zip(slots, hosts, strict=True):
            begin = time.perf_counter()
            for name, value in slot.items():
                value.copy_(host[name])
            plain.append(time.perf_counter() - begin)
    return pool.expert_bytes / min(cold[len(experts) :]), pool.expert_bytes / min(plain[len(experts) :])


def _transfer_us(group: RankGroup, pool: ExpertPool, clock: Callable[[], float]) -> tuple[float, float]:
    """(a received token there and back, two all-to-alls of one row each)."""
    medians = []
    for rows_each in (1, 128):
        x_NH = torch.zeros(rows_each * group.size, pool.hidden, dtype=pool.dtype, device=pool.device)
        counts = [rows_each] * group.size
        order = torch.randperm(len(x_NH), device=pool.device)
        times = []
        for _ in range(_REPEATS + 1):
            group.exchange(torch.zeros(1, dtype=torch.int32))
            begin = clock()
            back = all_to_all(group, all_to_all(group, x_NH[order], counts, counts), counts, counts)
            x_NH[order] = back
            times.append(clock() - begin)
        medians.append(1e6 * statistics.median(times[1:]))
    beta_us = max(0.0, medians[1] - medians[0]) / (127 * group.size)
    return beta_us, medians[0]


def device_clock(device: torch.device) -> Callable[[], float]:
    """Wall seconds; on CUDA after all work given to the device is done."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
