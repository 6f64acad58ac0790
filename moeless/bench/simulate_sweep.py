"""Sensitivity of the balancers: distance, the paper's V, batch size, cost model, and the ablation of its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moeless.config.simulate import SimulateConfig
from moeless.errors import UsageError
from moeless.policy.config import BALANCERS, BalancerConfig
from moeless.trace.loads import LoadTrace
from moeless.trace.routes import Routes

# Figures 13-16 of the paper.
DISTANCES = (1, 2, 3, 4, 5)
CV_THRESHOLDS = (0.2, 0.4, 0.6, 0.8, 1.0)

# Figure 17: the paper's method without its predictor (history instead), its scaler, its placer, and all three.
_PAPER = BALANCERS["moeless"]
ABLATION = {
    "moeless": _PAPER,
    "w/o pred": replace(_PAPER, loads="history"),
    "w/o scale": replace(_PAPER, scale="none"),
    "w/o place": replace(_PAPER, place="static"),
    "w/o pred + scale + place": replace(_PAPER, loads="history", scale="none", place="static"),
}

Runner = Callable[[SimulateConfig, dict[str, BalancerConfig]], list[dict[str, Any]]]


def sweep_points(
    config: SimulateConfig, source: Routes | LoadTrace, methods: dict[str, BalancerConfig]
) -> list[tuple[str, Any, SimulateConfig, dict[str, BalancerConfig]]]:
    """The runs of all sweeps asked for: (sweep, value, configuration, balancers).

    Raises:
        UsageError: a sweep that would change nothing here.
    """
    points: list[tuple[str, Any, SimulateConfig, dict[str, BalancerConfig]]] = []
    if "distance" in config.sweeps:
        if config.predictor_name not in ("conditional", "actual"):
            raise UsageError(
                f"--sweep distance changes nothing with --predictor {config.predictor}; use conditional or actual"
            )
        num_layers = source.num_layers
        points += [("distance", d, replace(config, distance=d), methods) for d in DISTANCES if d < num_layers]
    if "cv-threshold" in config.sweeps:
        paper = {name: m for name, m in methods.items() if m.scale == "cv"}
        if not paper:
            raise UsageError("--sweep cv-threshold needs moeless among --balancers: only it uses the threshold")
        for v in CV_THRESHOLDS:
            varied = {name: replace(m, cv_threshold=v) for name, m in paper.items()}
            points.append(("cv-threshold", v, replace(config, cv_threshold=v), varied))
    if "batch" in config.sweeps:
        if isinstance(source, LoadTrace):
            raise UsageError("--sweep batch needs a trace with the experts of each token, not counts")
        if config.prompts is not None or config.arrivals is not None or config.rate is not None:
            raise UsageError("--sweep batch composes its own iterations; leave out --prompts, --arrivals and --rate")
        points += [("batch", n, _with_batch(config, source, n), methods) for n in config.batch_list]
    if "cost" in config.sweeps:
        points += [("cost", cost, replace(config, cost=cost), methods) for cost in ("linear", "roofline")]
    if "ablation" in config.sweeps:
        points.append(("ablation", "all", config, ABLATION))
    return points


def _with_batch(config: SimulateConfig, source: Routes, num_tokens: int) -> SimulateConfig:
    """The same workload with `num_tokens` an iteration: as many streams where tokens are decoded."""
    if source.phase == "decode":
        return replace(config, streams=num_tokens, tokens_per_iteration=None)
    return replace(config, streams=None, tokens_per_iteration=num_tokens)


def sweep_row(row: dict[str, Any]) -> dict[str, Any]:
    """What a sweep keeps of a balancer's row."""
    keys = (
        "name",
        "lossy",
        "max_over_mean",
        "time_over_bound",
        "replicas_mean",
        "bytes_moved_per_iteration",
        "gap_closed",
    )
    return {key: row[key] for key in keys} | {"layer_ms": row["layer_ms"]["mean"], "layer_ms_cdf": row["layer_ms_cdf"]}
