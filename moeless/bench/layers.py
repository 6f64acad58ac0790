"""`moeless bench layers`: live time of one MoE layer on real ranks, every balancer on the same tokens.

With more ranks than cores wall time says nothing about a layer; `--clock cpu` then times each rank by its own processor
time, stage by stage, and takes the slowest rank for the layer. What the cost model makes of the very same divisions is
printed beside what was measured.

Legend: L measured layers, I measured iterations, B balancers, S stages, G ranks.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.bench.layers_experts import write_random_experts
from moeless.bench.layers_launch import run_ranks
from moeless.bench.layers_rank import COUNTED, LayersJob, RankTimes, measure
from moeless.bench.layers_routes import compose, load_routes
from moeless.bench.simulate_verdict import verdict
from moeless.config.layers import LayersConfig
from moeless.engine.moe_block import STAGES
from moeless.files import require_free_bytes, write_json
from moeless.metrics import max_over_mean
from moeless.policy.config import BALANCERS
from moeless.policy.cost import billed_gbs, resident_gbs
from moeless.policy.types import EpShape
from moeless.result import result_header

SCHEMA = "moeless.layers/1"

_LEAST_GAP = 0.02
"""Below this share of the bound the gap is noise, so no share of it is given."""


def run_layers(config: LayersConfig) -> dict[str, Any]:
    """Measure and write `layers.json`, or only calibrate and write a cluster file.

    Raises:
        DataError, UsageError, CapacityError: routes or sizes that cannot be used.
        RankError: a rank failed or time ran out.
    """
    header = result_header(SCHEMA, "live", config)
    if config.calibrate is not None:
        return {**header, **_calibrate(config, config.calibrate)}
    routes = load_routes(config)
    num_slots = config.slots_per_layer or routes.num_experts + config.ep
    shape = EpShape(num_experts=routes.num_experts, num_ranks=config.ep, num_slots=num_slots)
    ranks = _measure(config, routes.num_experts, compose(config, routes), shape.num_slots)
    rows = make_rows(config, ranks)
    result = {
        **header,
        "routes": {
            "name": routes.name,
            "experts": routes.num_experts,
            "top_k": routes.top_k,
            "layers": list(config.layer_numbers or ()) or f"{routes.num_layers} over the whole depth",
            "tokens_per_iteration": config.tokens_per_rank * config.ep,
            "slots_per_layer": num_slots,
        },
        "clock": _describe_clock(config),
        "calibration": ranks[0].calibration.as_dict(),
        "balancers": rows,
        "verdict": verdict([{**row, "iteration_ms": row["layer_ms"]["mean"]} for row in rows], None),
    }
    write_json(config.out / "layers.json", result)
    return result


def make_rows(config: LayersConfig, ranks: list[RankTimes]) -> list[dict[str, Any]]:
    """What is reported of each balancer. Keys are those of `bench simulate` where they mean the same.

    `overhead_share` is the share of the layer that the slowest rank's computation is not: exchange, plan, copying rows,
    and Python. `ranks` are mean compute times, `rank_rows` mean rows computed.
    """
    seconds_GLIBS = np.stack([rank.seconds_LIBS for rank in ranks])
    rows_GLIB = np.stack([rank.rows_LIB for rank in ranks])
    layer_ms_LIB = 1e3 * seconds_GLIBS.sum(-1).max(0)
    names = config.balancer_names
    bound_ms = layer_ms_LIB[:, :, names.index("bound")] if "bound" in names else None
    rows = []
    for b, name in enumerate(names):
        layer_ms, static_ms = layer_ms_LIB[:, :, b], layer_ms_LIB[:, :, 0]
        compute_GLI = 1e3 * seconds_GLIBS[:, :, :, b, STAGES.index("compute")]
        rows.append(
            {
                "name": name,
                "lossy": BALANCERS[name].lossy,
                "max_over_mean": _round(np.mean(max_over_mean(np.moveaxis(rows_GLIB[..., b], 0, -1)))),
                "layer_ms": _summary(layer_ms),
                "over_static": _round(layer_ms.mean() / static_ms.mean()),
                "gap_closed": _gap_closed(layer_ms, static_ms, bound_ms),
                "modelled_layer_ms": _round(ranks[0].modelled_us_LIB[:, :, b].mean() / 1e3),
                **_stages_ms(seconds_GLIBS[:, :, :, b]),
                "wait_ms": _round((compute_GLI.max(0) - compute_GLI.min(0)).mean()),
                "overhead_share": _round(1 - compute_GLI.max(0).mean() / layer_ms.mean()),
                "ranks": [_round(ms) for ms in compute_GLI.mean((1, 2))],
                "rank_rows": [_round(rows) for rows in rows_GLIB[..., b].mean((1, 2))],
                **_memory(ranks, b, layer_ms),
                "layer_ms_cdf": [_round(q) for q in np.quantile(layer_ms, np.linspace(0, 1, 101))],
                "layer_ms_by_layer": [_round(ms) for ms in layer_ms.mean(1)],
            }
        )
    return rows


def _memory(ranks: list[RankTimes], b: int, layer_ms: NDArray[np.float64]) -> dict[str, Any]:
    """Replicas, costs, moves and starts of balancer number `b`."""
    expert_bytes, layer_us = ranks[0].calibration.expert_bytes, 1e3 * layer_ms.ravel()
    live = ranks[0].replicas_LIB[:, :, b]
    resident = np.stack([rank.resident_LIB[:, :, b] for rank in ranks]).sum(0)
    counted = {key: int(value) for key, value in zip(COUNTED, ranks[0].counted_BC[b], strict=True)}
    billed = [billed_gbs(int(n), us, expert_bytes) for n, us in zip(live.ravel(), layer_us, strict=True)]
    kept = [resident_gbs(int(n), us, expert_bytes) for n, us in zip(resident.ravel(), layer_us, strict=True)]
    return {
        "replicas_mean": _round(live.mean()),
        "resident_gb": _round(resident.mean() * expert_bytes / 1e9),
        "billed_gb_s": _round(sum(billed)),
        "resident_gb_s": _round(sum(kept)),
        "bytes_moved": counted.pop("copies") * expert_bytes,
        **counted,
    }


def _measure(
    config: LayersConfig, num_experts: int, ids_LITK: NDArray[np.int64] | None, num_slots: int | None
) -> list[RankTimes]:
    """Write random weights of the shape asked for and run the ranks over them."""
    dtype = getattr(torch, config.dtype)
    num_bytes = num_experts * 3 * config.hidden * config.ffn * dtype.itemsize
    folder = Path(tempfile.gettempdir())
    require_free_bytes(folder, num_bytes, "random weights for the measurement")
    num_cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="moeless-layers-", dir=folder) as temporary:
        weights = Path(temporary) / "experts.safetensors"
        write_random_experts(
            weights, num_experts=num_experts, hidden=config.hidden, ffn=config.ffn, dtype=dtype, seed=config.seed
        )
        job = LayersJob(
            weights=weights,
            balancers=config.balancer_names,
            ids_LITK=ids_LITK,
            num_warmup=config.warmup,
            num_slots=num_slots,
            foresee=config.predictor == "actual",
            cpu_clock=config.clock == "cpu",
            num_repeats=config.num_repeats,
            seed=config.seed,
        )
        return run_ranks(
            measure,
            job,
            size=config.ep,
            device=config.device,
            num_threads=1 if config.clock == "cpu" else max(1, num_cores // config.ep),
            limit_s=config.limit_s,
        )


def _calibrate(config: LayersConfig, path: Path) -> dict[str, Any]:
    calibration = _measure(config, 4, None, None)[0].calibration
    num_parameters = 3 * config.hidden * config.ffn
    itemsize = getattr(torch, config.dtype).itemsize
    cluster = calibration.cluster(config.ep, num_parameters, config.hidden, itemsize)
    write_json(path, dataclasses.asdict(cluster))
    return {
        "clock": _describe_clock(config),
        "calibration": calibration.as_dict(),
        "cluster": dataclasses.asdict(cluster),
        "written": str(path),
    }


def _describe_clock(config: LayersConfig) -> str:
    if config.clock == "cpu":
        return (
            "each rank's own processor time, slowest rank (waiting and gloo's own thread do not count); "
            f"compute is the least of {config.num_repeats} runs"
        )
    return "wall time, slowest rank"


def _stages_ms(seconds_GLIS: NDArray[np.float64]) -> dict[str, float]:
    """Mean time of each stage on the rank that is slowest over all."""
    totals = seconds_GLIS.sum(-1)
    slowest = np.take_along_axis(seconds_GLIS, totals.argmax(0)[None, ..., None], 0)[0]
    return {f"{stage}_ms": _round(1e3 * slowest[..., s].mean()) for s, stage in enumerate(STAGES)}


def _gap_closed(
    layer_ms: NDArray[np.float64], static_ms: NDArray[np.float64], bound_ms: NDArray[np.float64] | None
) -> float | None:
    """The share of static's time above the measured bound that is removed; None where there is nothing to remove."""
    if bound_ms is None or static_ms.mean() <= (1 + _LEAST_GAP) * bound_ms.mean():
        return None
    return _round((static_ms.mean() - layer_ms.mean()) / (static_ms.mean() - bound_ms.mean()))


def _summary(layer_ms: NDArray[np.float64]) -> dict[str, float]:
    return {
        "mean": _round(layer_ms.mean()),
        "p50": _round(np.quantile(layer_ms, 0.5)),
        "p99": _round(np.quantile(layer_ms, 0.99)),
    }


def _round(value: Any) -> float:
    """Six significant digits."""
    return float(f"{float(value):.6g}")
