"""What a run did to the experts, from `moeless serve`'s own /metrics: differences of counters, and sampled gauges.

Counters give exact sums of the run. Balance and variation exist only step by step, so they are sampled from the last
step's gauges about once a second and at the end, and averaged over samples and layers.

Legend: L MoE layers, E experts, G ranks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from moeless.metrics import coefficient_of_variation, max_over_mean

_SAMPLE_S = 1.0
_PREFIX = "moeless:"

Labels = tuple[tuple[str, str], ...]
Scrape = dict[str, dict[Labels, float]]
"""Values by metric name without prefix, then by labels in order of their names."""


def parse(text: str) -> Scrape:
    """Our own metrics in Prometheus' text format; those of others are left out."""
    found: Scrape = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX):
                found[sample.name.removeprefix(_PREFIX)][tuple(sorted(sample.labels.items()))] = sample.value
    return dict(found)


class ExpertSampler:
    """Gauges of the expert layers, sampled while a load runs."""

    def __init__(self) -> None:
        """Without samples."""
        self.scrapes: list[Scrape] = []

    async def __call__(self, client: httpx.AsyncClient) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            if found := await scrape(client):
                self.scrapes.append(found)


async def scrape(client: httpx.AsyncClient) -> Scrape:
    """A server's metrics; empty when it has none of ours or does not answer."""
    try:
        answer = await client.get("/metrics")
    except httpx.HTTPError:
        return {}
    return parse(answer.text) if answer.status_code == 200 else {}


def describe_experts(before: Scrape, after: Scrape, samples: list[Scrape]) -> dict[str, Any] | None:
    """The `moe` block of a run; None when the server exports no expert loads.

    What the server does not have, such as times and costs of a model that runs whole on one rank, is None.
    """
    if "rank_tokens_total" not in after:
        return None
    samples = _fresh(before, [*samples, after])
    rank_tokens_LG = _table(gains(before, after, "rank_tokens_total"), "layer", "rank")
    expert_tokens_LE = _table(gains(before, after, "expert_tokens_total"), "layer", "expert")
    num_layers_run = total(before, after, "moe_layer_forward_seconds_count") or 0.0
    return {
        "balancedness": _gauge(samples, "balancedness", stage="observed"),
        "balancedness_static": _gauge(samples, "balancedness", stage="static"),
        "cv_before": _gauge(samples, "expert_load_cv", stage="before"),
        "cv_after_scaling": _gauge(samples, "expert_load_cv", stage="after_scaling"),
        "replicas_per_layer": _gauge(samples, "expert_replicas_per_layer"),
        "predictor_accuracy": _gauge(samples, "predictor_accuracy"),
        "num_samples": len(samples),
        "balancedness_of_sums": float(np.mean(max_over_mean(rank_tokens_LG))),
        "cv_of_sums": float(np.mean(coefficient_of_variation(expert_tokens_LE))) if expert_tokens_LE.size else None,
        "expert_tokens": float(rank_tokens_LG.sum()),
        "num_layer_forwards": num_layers_run,
        "layer_forward_ms": _mean_ms(before, after, "moe_layer_forward_seconds"),
        "straggler_ms": _mean_ms(before, after, "straggler_wait_seconds"),
        "stage_ms": _stages_ms(before, after, num_layers_run * rank_tokens_LG.shape[1]),
        "billed_gb_s": total(before, after, "cost_gb_seconds_total", component="billed"),
        "resident_gb_s": total(before, after, "cost_gb_seconds_total", component="resident"),
        "warm": total(before, after, "expert_starts_total", kind="warm"),
        "cold": total(before, after, "expert_starts_total", kind="cold"),
        "late": total(before, after, "expert_late_total"),
        "bytes_moved": total(before, after, "expert_bytes_moved_total"),
        "loads_wasted": total(before, after, "expert_loads_wasted_total"),
        "rank_failures": total(before, after, "rank_failures_total") or 0.0,
    }


def gains(before: Scrape, after: Scrape, name: str, **labels: str) -> dict[Labels, float]:
    """What a counter's samples with these labels have gained; one that was not there before began at 0."""
    earlier = before.get(name, {})
    return {
        key: value - earlier.get(key, 0.0)
        for key, value in after.get(name, {}).items()
        if labels.items() <= dict(key).items()
    }


def total(before: Scrape, after: Scrape, name: str, **labels: str) -> float | None:
    """The sum of `gains`; None for a counter that the server does not have."""
    found = gains(before, after, name, **labels)
    return sum(found.values()) if found else None


def _mean_ms(before: Scrape, after: Scrape, name: str) -> float | None:
    """The mean of what a histogram of seconds has gained, in ms."""
    count = total(before, after, f"{name}_count")
    return 1e3 * (total(before, after, f"{name}_sum") or 0.0) / count if count else None


def _table(values: dict[Labels, float], row: str, column: str) -> NDArray[np.float64]:
    """Values by two whole-number labels as an array."""
    cells = {(int(dict(key)[row]), int(dict(key)[column])): value for key, value in values.items()}
    table = np.zeros((1 + max((r for r, _ in cells), default=-1), 1 + max((c for _, c in cells), default=-1)))
    for place, value in cells.items():
        table[place] = value
    return table


def _stages_ms(before: Scrape, after: Scrape, num_runs: float) -> dict[str, float] | None:
    """Each stage's mean time in one layer on one rank."""
    found: dict[str, float] = defaultdict(float)
    for key, seconds in gains(before, after, "moe_stage_seconds_total").items():
        found[dict(key)["stage"]] += 1e3 * seconds / num_runs if num_runs else 0.0
    return dict(found) or None


def _fresh(before: Scrape, samples: list[Scrape]) -> list[Scrape]:
    """Samples before which a step was run since the one before; others would show no step, or the same step again."""
    pairs = pairwise([before, *samples])
    return [sample for earlier, sample in pairs if total(earlier, sample, "rank_tokens_total")]


def _gauge(samples: list[Scrape], name: str, **labels: str) -> float | None:
    """The mean over samples and layers."""
    values = [
        value
        for sample in samples
        for key, value in sample.get(name, {}).items()
        if labels.items() <= dict(key).items()
    ]
    return float(np.mean(values)) if values else None
