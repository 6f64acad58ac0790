"""Sums from ranks that come and go: totals only ascend, and equal what was counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeless.engine.durations import LAYER_BUCKETS_S
from moeless.engine.expert_metrics import ExpertMetrics
from moeless.engine.traffic import Traffic
from moeless.errors import DataError
from moeless.trace.files import load_trace

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, TOP_K = 2, 4, 2, 2


def steps(traffic: Traffic, seed: int, num_steps: int = 3) -> np.ndarray:
    """Random steps of 10 tokens a rank; the counts [L, E] they add."""
    rng, total_LE = np.random.default_rng(seed), np.zeros((NUM_LAYERS, NUM_EXPERTS), int)
    for _ in range(num_steps):
        for layer in range(NUM_LAYERS):
            counts_GE = rng.multinomial(10 * TOP_K, [0.7, 0.1, 0.1, 0.1], size=NUM_RANKS)
            shares_EG = np.stack([counts_GE.sum(0), np.zeros(NUM_EXPERTS, int)], axis=1)
            shares_EG[0] = counts_GE[:, 0]  # the hot expert has a replica on the other rank
            traffic.note(layer, counts_GE, shares_EG, shares_EG > 0, None)
            traffic.note_time(layer, 0.0035, {"plan": 0.00015, "dispatch": 0.001, "combine": 0.003, "compute": 0.0})
            traffic.straggler[layer].note(0.0004)
            total_LE[layer] += counts_GE.sum(0)
        traffic.end_iteration(phase="decode", num_tokens=10, duration_s=0.1)
    return total_LE


def value(metrics: ExpertMetrics, name: str) -> dict[tuple[str, ...], float]:
    samples = [s for family in metrics.collect() for s in family.samples if s.name == f"moeless:{name}"]
    return {tuple(s.labels.values()): s.value for s in samples}


def test_totals_ascend_over_generations_of_ranks() -> None:
    metrics, expected_LE = ExpertMetrics(expert_detail=True), np.zeros((NUM_LAYERS, NUM_EXPERTS), int)
    for generation in range(3):
        metrics.start_team()
        traffic = Traffic(NUM_LAYERS, NUM_EXPERTS, NUM_RANKS)
        for report in range(2):
            expected_LE += steps(traffic, seed=10 * generation + report)
            metrics.update_traffic(traffic.report())
            metrics.update_traffic(traffic.report())  # the same again adds nothing
            tokens = value(metrics, "expert_tokens_total")
            assert tokens == {
                (str(i), str(j)): expected_LE[i, j] for i in range(NUM_LAYERS) for j in range(NUM_EXPERTS)
            }
            assert sum(value(metrics, "rank_tokens_total").values()) == expected_LE.sum()
    assert expected_LE.sum() == 18 * 2 * 10 * TOP_K * NUM_LAYERS
    times = value(metrics, "moe_layer_forward_seconds_bucket")
    assert times["0", "0.002"] == 0
    assert times["0", "0.004"] == times["0", "+Inf"] == 18
    assert len(times) == NUM_LAYERS * (len(LAYER_BUCKETS_S) + 1)
    straggler = value(metrics, "straggler_wait_seconds_bucket")
    assert (straggler["1", "0.0002"], straggler["1", "0.0005"]) == (0, 18)
    assert value(metrics, "straggler_wait_seconds_sum")["1",] == pytest.approx(18 * 0.0004)
    assert value(metrics, "alltoall_seconds_sum")["combine",] == pytest.approx(18 * NUM_LAYERS * 0.003)
    plans = value(metrics, "plan_seconds_bucket")
    assert (plans["0.0001",], plans["0.0002",], plans["+Inf",]) == (0, 36, 36)
    assert value(metrics, "predictor_seconds_count") == {(): 0}
    assert value(metrics, "expert_cold_start_seconds_count") == {(): 0}


def test_gauges_equal_their_definitions() -> None:
    traffic = Traffic(1, NUM_EXPERTS, NUM_RANKS)
    counts_GE = np.array([[12, 2, 0, 2], [8, 0, 4, 4]])
    shares_EG = np.array([[10, 10], [2, 0], [0, 4], [0, 6]])
    traffic.note(0, counts_GE, shares_EG, shares_EG > 0, np.array([14, 6, 4, 8]))
    gauges = traffic.gauges()
    assert gauges["balancedness"] == [pytest.approx(20 / 16)]
    assert gauges["balancedness_static"] == [pytest.approx(22 / 16)]
    loads, parts = np.array([20, 2, 4, 6]), np.array([10, 10, 2, 4, 6])
    assert gauges["cv_before"] == [pytest.approx(loads.std() / loads.mean())]
    assert gauges["cv_after"] == [pytest.approx(parts.std() / parts.mean())]
    assert gauges["replicas"] == [[2, 1, 1, 1]]
    assert gauges["balancedness_planned"] == [pytest.approx((14 / 2 + 4 + 8) / 16)]
    assert gauges["accuracy"] == [pytest.approx(1 - 0.5 * (6 + 4 + 0 + 2) / 32)]


def test_a_record_is_bounded_and_a_trace(tmp_path: Path) -> None:
    traffic = Traffic(NUM_LAYERS, NUM_EXPERTS, NUM_RANKS)
    with pytest.raises(DataError, match="no expert distribution record"):
        traffic.stop_record()
    capacity = traffic.start_record(1_000)
    assert 1 <= capacity < 10
    steps(traffic, seed=0, num_steps=20)
    assert traffic.stop_record() == capacity
    steps(traffic, seed=1)  # not recorded any more
    assert traffic.write_record(tmp_path / "record.safetensors") == capacity
    trace = load_trace(tmp_path / "record.safetensors")
    assert trace.metadata["num_overwritten"] == 20 - capacity
    assert trace.num_tokens_I.tolist() == [20] * capacity  # of both ranks
    assert (trace.counts_ILE.sum(2) == 20 * TOP_K).all()
