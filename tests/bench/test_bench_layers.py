"""`moeless bench layers` on two real ranks, and the arithmetic of its calibration."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeless.bench.layers import run_layers
from moeless.bench.layers_experts import RandomExperts, write_random_experts
from moeless.bench.layers_print import print_layers
from moeless.bench.layers_routes import compose, load_routes
from moeless.config.layers import LayersConfig
from moeless.config.simulate import SimulateConfig
from moeless.engine.calibrate import Calibration, fit_roofline
from moeless.errors import RankError, UsageError
from moeless.policy.cost import Cluster, ModelShape, cost_of

torch.set_num_threads(1)


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    """Two layers of eight experts, top-2, the first experts much more popular than the last."""
    rng = np.random.default_rng(0)
    scores = rng.random((600, 2, 8)) + np.linspace(0.8, 0, 8)
    path = tmp_path / "routes.npy"
    np.save(path, np.argsort(-scores, axis=-1)[..., :2].astype(np.uint8))
    return path


def small(routes: Path | None, **fields: Any) -> LayersConfig:
    sizes = {"hidden": 64, "ffn": 64, "tokens_per_rank": 32, "iterations": 3, "warmup": 20, "limit_s": 120.0}
    return LayersConfig(routes=routes, **{**sizes, **fields})


def test_two_ranks_measured_by_their_own_clocks(
    routes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(multiprocessing.active_children())
    result = run_layers(small(routes, clock="cpu", out=tmp_path, balancers="eplb,moeless-roofline,bound"))
    assert json.loads((tmp_path / "layers.json").read_text()) == result
    assert result["source"] == "live"
    assert result["verdict"]["imbalance"] == result["balancers"][0]["max_over_mean"]
    rows = {row["name"]: row for row in result["balancers"]}
    assert list(rows) == ["static", "eplb", "moeless-roofline", "bound"]
    for row in rows.values():
        stages = sum(row[f"{stage}_ms"] for stage in ("exchange", "plan", "dispatch", "compute", "combine"))
        assert stages == pytest.approx(row["layer_ms"]["mean"], rel=1e-3)
        assert row["layer_ms_cdf"][0] <= row["layer_ms"]["p50"] <= row["layer_ms_cdf"][-1]
        assert len(row["ranks"]) == 2
        assert sum(row["rank_rows"]) == pytest.approx(2 * 32 * 2, rel=1e-4)
        assert 0 < row["overhead_share"] < 1
        assert row["billed_gb_s"] > 0
        assert row["resident_gb_s"] >= 0.5 * row["billed_gb_s"]
    assert rows["static"]["over_static"] == 1
    assert rows["static"]["bytes_moved"] == rows["static"]["late"] == rows["static"]["cold"] == 0
    assert rows["static"]["max_over_mean"] > 1.2
    assert rows["bound"]["max_over_mean"] < rows["static"]["max_over_mean"]
    print_layers(result)
    assert "live" in capsys.readouterr().out
    assert set(multiprocessing.active_children()) == before


def test_calibration_is_a_cluster_that_simulate_takes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    result = run_layers(small(None, calibrate=path, out=tmp_path))
    cluster = Cluster(**json.loads(path.read_text()))
    assert result["cluster"] == json.loads(path.read_text())
    measured = result["calibration"]
    cost = cost_of(ModelShape(1, 4, 2, hidden=64, ffn=64, weight_bytes=4, activation_bytes=4), cluster)
    assert cost.floor_us == pytest.approx(measured["floor_us"])
    assert cost.alpha_us == pytest.approx(measured["alpha_us"])
    assert cost.beta_us == pytest.approx(measured["beta_us"])
    assert cost.copy_bytes_per_s == measured["copy_bytes_per_s"]
    assert SimulateConfig(routes=tmp_path, cluster=str(path)).cluster == str(path)


def test_ranks_that_take_too_long_are_ended(routes: Path) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(RankError, match=r"more than 1 s; give more with --limit-s"):
        run_layers(small(routes, limit_s=1, iterations=5_000))
    assert set(multiprocessing.active_children()) == before


@given(floor=st.floats(1, 1e4), crossing=st.integers(1, 7))
def test_the_roofline_is_found_again(floor: float, crossing: int) -> None:
    tokens = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    alpha = floor / tokens[crossing]
    found = fit_roofline(tokens, [max(floor, alpha * n) for n in tokens])
    assert found == pytest.approx((floor, alpha), rel=1e-6)


def test_calibrated_costs_survive_the_way_through_rates() -> None:
    found = Calibration(20.0, 0.5, 0.25, 9.0, 2e9, 3e9, 3 * 64 * 32 * 4, ((1, 20.0),))
    cluster = found.cluster(4, 3 * 64 * 32, 64, 4)
    cost = cost_of(ModelShape(1, 8, 2, hidden=64, ffn=32, weight_bytes=4, activation_bytes=4), cluster)
    assert (cost.floor_us, cost.alpha_us, cost.beta_us) == pytest.approx((20, 0.5, 0.25))
    assert found.cold_start_over_memcpy == 1.5


def test_random_experts_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    write_random_experts(path, num_experts=3, hidden=64, ffn=96, dtype=torch.float32, seed=1)
    source = RandomExperts(path)
    assert (source.num_experts, source.hidden, source.dtype) == (3, 64, torch.float32)
    slots = [{name: torch.empty(shape) for name, shape in source.shapes.items()} for _ in range(3)]
    for expert, slot in enumerate(slots):
        source.read_into(0, expert, slot)
    assert not torch.equal(slots[0]["down_proj"], slots[1]["down_proj"])
    y = source.ffns[0](torch.randn(50, 64), slots[2])
    assert 0.1 < float(y.std()) < 10


def test_iterations_are_the_routes_tokens(routes: Path) -> None:
    config = small(routes, layers="1", iterations=2, warmup=1)
    loaded = load_routes(config)
    ids_LITK = compose(config, loaded)
    assert ids_LITK.shape == (1, 3, 64, 2)
    assert ids_LITK[0, 1].tolist() == np.load(routes)[64:128, 1].tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "x"}, "--routes and --model exclude"),
        ({"device": "cuda", "clock": "cpu"}, "--clock cpu has no effect"),
        ({"repeats": 2}, "--repeats 2 has no effect"),
        ({"calibrate": Path("x.json")}, "no effect with --calibrate"),
        ({"balancers": "fast"}, "--balancers takes"),
    ],
)
def test_flags_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LayersConfig(routes=Path("r.npy"), **fields)
