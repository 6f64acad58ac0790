"""What the expert layers do, as Prometheus metrics: where tokens went, replicas, starts, times and cost.

Values are kept as arrays and written out on a scrape: there may be thousands of experts.

Legend: L MoE layers, E experts, G ranks, B time buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moeless.engine.durations import LAYER_BUCKETS_S, STAGE_BUCKETS_S
from moeless.engine.traffic import PARTS

_SUMS = ("tokens", "rank_tokens", "layer_s", "straggler_s", *(f"{name}_s" for name in PARTS))
_PREFIX = "moeless:"


class ExpertMetrics(Collector):
    """See the module's head. A difference of two reports is added to what earlier ranks had reached."""

    def __init__(self, expert_detail: bool) -> None:
        """Nothing to show before the first report."""
        self._expert_detail = expert_detail
        self._totals: dict[str, np.ndarray] = {}
        self._last: dict[str, np.ndarray] = {}
        self._meters: dict[tuple[int, str], float] = {}
        self._last_meters: dict[tuple[int, str], float] = {}
        self._resident: dict[int, float] = {}
        self._gauges: dict[str, list[Any]] = {}

    def start_team(self) -> None:
        """New ranks report from zero."""
        self._last.clear()
        self._last_meters.clear()
        self._resident.clear()

    def update_traffic(self, report: dict[str, Any]) -> None:
        """Take in `Traffic.report` of rank 0."""
        for name in _SUMS:
            new = np.asarray(report[name])
            before = self._last.get(name)
            gain = new if before is None or before.shape != new.shape else new - before
            total = self._totals.get(name)
            self._totals[name] = gain if total is None or total.shape != gain.shape else total + gain
            self._last[name] = new
        self._gauges = {name: value for name, value in report.items() if name not in _SUMS}

    def update_rank(self, rank: int, meters: dict[str, Any]) -> None:
        """Take in `ExpertLayers.metrics` of a rank."""
        pool = meters["pool"]
        self._resident[rank] = pool["resident_bytes"]
        sums = {"bytes_moved": pool["bytes_moved"], "failures": pool["failures"], "wasted": pool["wasted"]}
        sums |= {f"stage_{name}": seconds for name, seconds in meters["stage_s"].items()}
        sums["resident_gb_s"] = meters["resident_gb_s"]
        sums |= {f"verify_{name}": count for name, count in (meters["verify"] or {}).items()}
        if rank == 0:  # the same on all ranks
            sums["for_room"] = meters["evictions"] - meters["expired"]
            names = ("warm", "cold", "late", "expired", "billed_gb_s")
            sums |= {name: meters[name] for name in names}
            sums |= {f"plan_{name}": count for name, count in meters["plans"].items()}
        for name, value in sums.items():
            key = (rank, name)
            gain = max(0.0, value - self._last_meters.get(key, 0.0))
            self._meters[key] = self._meters.get(key, 0.0) + gain
            self._last_meters[key] = value

    def collect(self) -> Iterator[Metric]:
        """Called on a scrape."""
        if self._totals:
            yield from self._traffic()
            yield from self._times()
            yield from self._shapes()
        if self._meters:
            yield from self._starts()
            yield from self._costs()
            yield from self._verified()

    def _traffic(self) -> Iterator[Metric]:
        tokens_LE, rank_tokens_LG = self._totals["tokens"], self._totals["rank_tokens"]
        if self._expert_detail:
            help = "Token-expert pairs routed to an expert; the sum is tokens x k x layers."
            yield _table(_counter("expert_tokens", help, "layer", "expert"), tokens_LE)
        help = "Token-expert pairs computed on a rank."
        yield _table(_counter("rank_tokens", help, "layer", "rank"), rank_tokens_LG)

    def _times(self) -> Iterator[Metric]:
        help = "Time of an expert layer on rank 0, from the exchange to the combined result."
        yield self._by_layer("moe_layer_forward_seconds", help, "layer_s", LAYER_BUCKETS_S)
        help = "Longest minus mean time of all ranks in a layer's experts: what the mean rank waits for a straggler."
        yield self._by_layer("straggler_wait_seconds", help, "straggler_s", STAGE_BUCKETS_S)
        help = (
            "Time of rank 0 in a layer's all-to-all, waiting for slower ranks included; dispatch: rows to experts, "
            "less the planning done meanwhile; combine: results back, weighted sum included."
        )
        family = _histogram("alltoall_seconds", help, "op")
        for op in ("dispatch", "combine"):
            _add_times(family, [op], self._totals[f"{op}_s"][0], STAGE_BUCKETS_S)
        yield family
        parts = {
            "plan": ("plan_seconds", "Time of rank 0 in a layer for its split and the plan of the layer ahead."),
            "predictor": ("predictor_seconds", "Time of rank 0 for one layer's prediction and its counts."),
            "cold_start": ("expert_cold_start_seconds", "Time of rank 0 for an expert that its layer waited for."),
        }
        for part, (name, help) in parts.items():
            family = _histogram(name, help)
            _add_times(family, [], self._totals[f"{part}_s"][0], STAGE_BUCKETS_S)
            yield family

    def _shapes(self) -> Iterator[Metric]:
        gauges = self._gauges
        help = (
            "Largest over mean token-expert pairs of a rank in the last step, 1 is even; static: had experts been laid "
            "out contiguously; planned: of predicted pairs, divided evenly over ready replicas."
        )
        balance = GaugeMetricFamily(f"{_PREFIX}balancedness", help, labels=["layer", "stage"])
        _add_layers(balance, "observed", gauges["balancedness"])
        _add_layers(balance, "static", gauges["balancedness_static"])
        _add_layers(balance, "planned", gauges["balancedness_planned"])
        yield balance
        help = "Standard deviation over mean of the loads above 0 in the last step: of experts, then of replicas."
        variation = GaugeMetricFamily(f"{_PREFIX}expert_load_cv", help, labels=["layer", "stage"])
        _add_layers(variation, "before", gauges["cv_before"])
        _add_layers(variation, "after_scaling", gauges["cv_after"])
        yield variation
        replicas_LE = np.asarray(gauges["replicas"])
        if self._expert_detail:
            help = "Replicas of an expert that were ready in the last step."
            yield _table(GaugeMetricFamily(f"{_PREFIX}expert_replicas", help, labels=["layer", "expert"]), replicas_LE)
        help = "Replicas of a layer that were ready in the last step."
        family = GaugeMetricFamily(f"{_PREFIX}expert_replicas_per_layer", help, labels=["layer"])
        for layer, count in enumerate(replicas_LE.sum(1).tolist()):
            family.add_metric([str(layer)], count)
        yield family
        help = "1 - half the L1 distance of predicted and true load shares in the last step; layers with a prediction."
        accuracy = GaugeMetricFamily(f"{_PREFIX}predictor_accuracy", help, labels=["layer", "distance"])
        _add_layers(accuracy, str(gauges["distance"]), gauges["accuracy"])
        yield accuracy

    def _starts(self) -> Iterator[Metric]:
        help = "Replicas that got tokens: warm ones were ready, cold ones were loaded while their layer waited."
        yield self._by_name("expert_starts", help, "kind", {"warm": "warm", "cold": "cold"})
        help = "Wanted replicas that were still loading when their layer ran, and were left out."
        yield self._by_name("expert_late", help, "kind", {"late": "late"})
        help = "Replicas dropped: unused for the keep-alive time, or for room."
        yield self._by_name("expert_evictions", help, "reason", {"keepalive": "expired", "memory": "for_room"})
        help = "Plans not made from a prediction, by what they were made from; failed keeps the placement there was."
        names = {name: f"plan_{name}" for name in ("history", "static", "failed")}
        yield self._by_name("plan_fallback", help, "reason", names)
        help = "Bytes of expert weights copied to a rank."
        yield self._by_rank("expert_bytes_moved", help, "bytes_moved")
        help = "Replicas loaded to a rank and dropped before any token came."
        yield self._by_rank("expert_loads_wasted", help, "wasted")
        help = "Loads of expert weights that failed."
        yield self._by_rank("expert_load_failures", help, "failures")

    def _costs(self) -> Iterator[Metric]:
        family = _counter("moe_stage_seconds", "Time of a rank's expert layers by stage.", "stage", "rank")
        for (rank, name), value in sorted(self._meters.items()):
            if name.startswith("stage_"):
                family.add_metric([name.removeprefix("stage_"), str(rank)], value)
        yield family
        help = "billed: live replicas x expert GB x their layer's seconds; resident: GB of experts in memory x seconds."
        cost = _counter("cost_gb_seconds", help, "component")
        cost.add_metric(["billed"], self._sum("billed_gb_s"))
        cost.add_metric(["resident"], self._sum("resident_gb_s"))
        yield cost
        memory = GaugeMetricFamily(
            f"{_PREFIX}expert_memory_bytes", "Expert weights in a rank's memory.", labels=["rank"]
        )
        for rank, num_bytes in sorted(self._resident.items()):
            memory.add_metric([str(rank)], num_bytes)
        yield memory

    def _verified(self) -> Iterator[Metric]:
        """Nothing without --verify: a zero would look like a clean bill."""
        if not any(name == "verify_verified_layers" for _, name in self._meters):
            return
        help = "Executions of expert layers that a rank computed a second time, plainly, for its own tokens."
        yield self._by_rank("verified_layers", help, "verify_verified_layers")
        help = "Executions of expert layers whose second computation differed by more than rounding: wrong output."
        yield self._by_rank("verify_mismatches", help, "verify_mismatches")
        help = "Executions of expert layers that could not be verified, as an expert could not be read."
        yield self._by_rank("verify_unreadable", help, "verify_unreadable")

    def _by_layer(self, name: str, help: str, key: str, bounds_s: Sequence[float]) -> Metric:
        family = _histogram(name, help, "layer")
        for layer, row in enumerate(self._totals[key]):
            _add_times(family, [str(layer)], row, bounds_s)
        return family

    def _sum(self, name: str) -> float:
        return sum(value for (_, key), value in self._meters.items() if key == name)

    def _by_name(self, name: str, help: str, label: str, names: dict[str, str]) -> Metric:
        family = _counter(name, help, label)
        for value, key in names.items():
            family.add_metric([value], self._sum(key))
        return family

    def _by_rank(self, name: str, help: str, key: str) -> Metric:
        family = _counter(name, help, "rank")
        for rank in sorted({rank for rank, other in self._meters if other == key}):
            family.add_metric([str(rank)], self._meters[rank, key])
        return family


def _counter(name: str, help: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, help, labels=labels)


def _histogram(name: str, help: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(_PREFIX + name, help, labels=labels)


def _add_times(family: HistogramMetricFamily, labels: list[str], row: np.ndarray, bounds_s: Sequence[float]) -> None:
    """A sample from `Durations.report`."""
    bounds = [*(f"{bound:g}" for bound in bounds_s), "+Inf"]
    family.add_metric(labels, list(zip(bounds, np.cumsum(row[:-1]).tolist(), strict=True)), float(row[-1]))


def _table(family: Any, values: np.ndarray) -> Metric:
    """One sample a cell, labelled by row and column."""
    for row, cells in enumerate(values.tolist()):
        for column, value in enumerate(cells):
            family.add_metric([str(row), str(column)], value)
    metric: Metric = family
    return metric


def _add_layers(family: GaugeMetricFamily, second: str, values: Sequence[float | None]) -> None:
    """A sample a layer that has a value, with the second label's value."""
    for layer, value in enumerate(values):
        if value is not None:
            family.add_metric([str(layer), second], value)
