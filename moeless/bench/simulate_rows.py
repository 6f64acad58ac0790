"""What is reported of one balancer's replay. Keys are those of `simulate.json`.

Legend: I iterations, L MoE layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.bench.simulate_replay import Replay
from moeless.policy.cost import CostModel, billed_gbs, resident_gbs
from moeless.trace.loads import PHASES, LoadTrace

Floats = NDArray[np.float64]

_LEAST_GAP = 0.002
"""Below this share of the bound there is nothing to close, so no share of it is given."""


def make_row(
    name: str, lossy: bool, run: Replay, static: Replay, trace: LoadTrace, cost: CostModel, warmup: int
) -> dict[str, Any]:
    """Everything reported of one balancer; the first `warmup` iterations count for copies and starts only.

    `gap_closed` is the share of static's time above the lower bound (every expert launched once, times perfectly
    divided) that the balancer removes: 1 at the bound, which no lossless method can pass.
    """
    on = slice(warmup, None)
    layer_ms = run.layer_us_IL[on].ravel() / 1e3
    bound, before = run.bound_us_IL[on].mean(), static.layer_us_IL[on].mean()
    gap = before - bound
    num_copies = run.copies_I[on]
    quarter = max(1, len(num_copies) // 4)
    return {
        "name": name,
        "lossy": lossy,
        "max_over_mean": _round(run.max_over_mean_IL[on].mean()),
        "max_over_mean_p99": _round(np.quantile(run.max_over_mean_IL[on], 0.99)),
        "time_over_bound": _round(layer_ms.mean() * 1e3 / bound),
        "replica_cv": _round(run.replica_cv_IL[on].mean()),
        "layer_ms": {
            "mean": _round(layer_ms.mean()),
            "p50": _round(np.quantile(layer_ms, 0.5)),
            "p99": _round(np.quantile(layer_ms, 0.99)),
        },
        "iteration_ms": _round(run.iteration_us_I[on].mean() / 1e3),
        "billed_gb_s": _round(billed_total(run, cost)),
        "resident_gb_s": _round(resident_total(run, cost)),
        "resident_gb": _round(run.resident_I[on].mean() * cost.expert_bytes / 1e9),
        "replicas_mean": _round(run.replicas_IL[on].mean()),
        "bytes_moved": int(run.copies_I.sum() * cost.expert_bytes),
        "bytes_moved_per_iteration": _round(num_copies.mean() * cost.expert_bytes),
        "bytes_moved_per_iteration_last_quarter": _round(num_copies[-quarter:].mean() * cost.expert_bytes),
        "warm": run.num_warm,
        "cold": run.num_cold,
        "late": run.num_late,
        "wasted": run.num_wasted,
        "peak_slots_per_rank": run.peak_slots_per_rank,
        "gap_closed": round((before - layer_ms.mean() * 1e3) / gap, 6) + 0.0 if gap > _LEAST_GAP * bound else None,
        "phases": _by_phase(run, trace, warmup),
        "layer_ms_cdf": [_round(q) for q in np.quantile(layer_ms, np.linspace(0, 1, 101))],
        "timeline": {
            "time_over_bound": [_round(t) for t in _ratio(run.layer_us_IL.sum(1), run.bound_us_IL.sum(1))],
            "bytes_moved": [int(n * cost.expert_bytes) for n in run.copies_I],
        },
    }


def billed_total(run: Replay, cost: CostModel) -> float:
    """GB·s: sum over iterations and layers of the layer's live replicas x expert GB x that layer's own seconds."""
    return sum(
        billed_gbs(int(n), float(us), cost.expert_bytes)
        for n, us in zip(run.replicas_IL.ravel(), run.layer_us_IL.ravel(), strict=True)
    )


def resident_total(run: Replay, cost: CostModel) -> float:
    """GB·s: sum over iterations of the replicas of all layers in memory x expert GB x the iteration's wall seconds."""
    return sum(
        resident_gbs(int(n), float(us), cost.expert_bytes)
        for n, us in zip(run.resident_I, run.iteration_us_I, strict=True)
    )


def settled_after(ratios: list[float], start: int, tolerance: float = 0.02, window: int = 8) -> int | None:
    """Iterations after `start` until the ratio to the bound stays, on a mean of `window`, within `tolerance` of its
    final level (the mean of the last quarter); None when it never does."""
    tail = np.array(ratios[start:])
    final = tail[-max(1, len(tail) // 4) :].mean()
    for first in range(len(tail) - window + 1):
        if tail[first : first + window].mean() <= final * (1 + tolerance):
            return first
    return None


def _by_phase(run: Replay, trace: LoadTrace, warmup: int) -> dict[str, dict[str, float]]:
    """Layer time and balance of prefill, decode and mixed iterations apart."""
    rows = {}
    phases_I = trace.phases_I[warmup:]
    for index in np.unique(phases_I).tolist():
        picked = np.flatnonzero(phases_I == index) + warmup
        rows[PHASES[index]] = {
            "iterations": len(picked),
            "layer_ms_mean": _round(run.layer_us_IL[picked].mean() / 1e3),
            "max_over_mean": _round(run.max_over_mean_IL[picked].mean()),
        }
    return rows


def _ratio(times: Floats, bounds: Floats) -> Floats:
    return np.divide(times, bounds, out=np.ones_like(times), where=bounds > 0)


def _round(value: float) -> float:
    """Six significant digits: enough to compare, short enough to read."""
    return float(f"{float(value):.6g}")
