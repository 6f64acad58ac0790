"""`moeless bench simulate` as a user runs it: result file, verdict, exports, and flags that would be ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeless.bench.simulate import run_simulate
from moeless.bench.simulate_print import print_simulate
from moeless.bench.simulate_verdict import verdict
from moeless.config.simulate import SimulateConfig
from moeless.errors import DataError, MoelessError, UsageError
from moeless.trace.files import save_trace
from moeless.trace.loads import make_loads
from moeless.trace.plans import hosts_of, read_sglang_plan, read_tensorrt_plan
from moeless.trace.recorder import Recorder
from tests.traces import skewed_ids, skewed_routes

ROW_KEYS = {"name", "lossy", "max_over_mean", "layer_ms", "billed_gb_s", "resident_gb_s", "replicas_mean"}
ROW_KEYS |= {"bytes_moved", "warm", "cold", "late", "gap_closed"}


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    """32 experts, top-4, as gpt-oss-20b has, so that its shape is recognised; two domains."""
    made = skewed_routes(num_layers=3, num_experts=32, top_k=4)
    path = tmp_path / "routes.npz"
    labels = np.array(made.labels["dataset"])
    lengths = np.zeros(len(labels), int)
    np.savez(path, experts=made.ids_TLK, offsets=made.offsets, dataset=labels, prompt_tokens=lengths)
    return path


def config_of(routes: Path, **changes: Any) -> SimulateConfig:
    base = {"iterations": 24, "warmup": 8, "streams": 256, "plots": False, "out": routes.parent / "out"}
    return SimulateConfig(routes=routes, **(base | changes))


def names(result: dict[str, Any]) -> list[str]:
    return [row["name"] for row in result["balancers"]]


def test_result_file(routes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(routes, balancers="eplb,oracle,bound,moeless,moeless-roofline")
    result = run_simulate(config)
    assert json.loads((config.out / "simulate.json").read_text()) == json.loads(json.dumps(result))
    assert result["source"] == "simulated"
    assert result["schema"] == "moeless.simulate/1"
    assert names(result) == ["static", "eplb", "oracle", "bound", "moeless", "moeless-roofline"]
    for row in result["balancers"]:
        assert row.keys() >= ROW_KEYS
        assert row["layer_ms"].keys() == {"mean", "p50", "p99"}
        assert row["layer_ms"]["p50"] <= row["layer_ms"]["p99"]
        assert len(row["layer_ms_cdf"]) == 101
        assert len(row["timeline"]["bytes_moved"]) == 24
        assert sum(row["timeline"]["bytes_moved"]) == row["bytes_moved"]
    assert [row["lossy"] for row in result["balancers"]] == [False, False, True, False, False, False]
    assert result["balancers"][0]["gap_closed"] == 0
    assert result["balancers"][0]["bytes_moved"] == 0
    assert result["verdict"].keys() >= {"worth_it", "reason"}
    print_simulate(result)
    shown = capsys.readouterr().out
    assert "simulated, not measured" in shown
    assert "oracle (lossy)" in shown
    assert "verdict:" in shown


def test_same_seed_same_numbers(routes: Path) -> None:
    first, second = (run_simulate(config_of(routes, streams=64, predictor="noisy:0.4")) for _ in range(2))
    assert first["balancers"] == second["balancers"]
    other = run_simulate(config_of(routes, streams=64, seed=1))
    assert other["balancers"] != first["balancers"]


def test_verdicts(routes: Path, tmp_path: Path) -> None:
    skewed = run_simulate(config_of(routes, streams=2_048))["verdict"]
    assert skewed["worth_it"]
    assert "cuts the iteration by" in skewed["reason"]
    np.savez(tmp_path / "flat.npz", experts=np.arange(32).repeat(3).reshape(8, 4, 3).transpose(0, 2, 1))
    flat = run_simulate(config_of(tmp_path / "flat.npz", streams=None, tokens_per_iteration=8))["verdict"]
    assert not flat["worth_it"]
    assert flat["reason"].startswith("do nothing: static ranks wait for one with 1.00x the mean load")


def test_lossy_methods_and_the_bound_are_never_recommended() -> None:
    def row(name: str, ms: float, lossy: bool = False) -> dict[str, Any]:
        layer = {"mean": ms, "p50": ms, "p99": ms}
        return {
            "name": name,
            "lossy": lossy,
            "iteration_ms": ms,
            "layer_ms": layer,
            "max_over_mean": 2.0,
            "resident_gb": 1,
        }

    found = verdict([row("static", 1.0), row("oracle", 0.1, True), row("bound", 0.2), row("eplb", 0.9)], None)
    assert (found["best"], found["worth_it"], found["gain"]) == ("eplb", True, 0.1)
    found = verdict([row("static", 1.0), row("eplb", 1.1)], None)
    assert (found["worth_it"], found["gain"]) == (False, -0.1)
    assert "no method here is faster" in found["reason"]
    rows = [row("static", 1.0), row("moeless-roofline", 0.8)]
    assert "history alone does as well" in verdict(rows, row("moeless-roofline", 0.8))["prediction_reason"]
    assert "saves 20.0%" in verdict(rows, row("moeless-roofline", 1.0))["prediction_reason"]


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_exported_plan(routes: Path, suffix: str) -> None:
    path = routes.parent / f"plan{suffix}"
    run_simulate(config_of(routes, streams=2_048, export_plan=path))
    slots = read_tensorrt_plan(path)[0] if suffix == ".yaml" else read_sglang_plan(path)
    assert slots.shape == (3, 40)
    for row in slots.tolist():
        hosts = hosts_of(row, 32, 8)
        assert max(map(len, hosts)) > 1
    run_simulate(config_of(routes, streams=2_048, export_plan=path, export_first_layer=2))
    if suffix == ".yaml":
        again, first = read_tensorrt_plan(path)
        assert first == 2
    else:
        again = read_sglang_plan(path)[2:]
        assert read_sglang_plan(path)[:2].tolist() == [[*range(32), *range(8)]] * 2
    np.testing.assert_array_equal(again, slots)


def test_sweeps_and_pictures(routes: Path) -> None:
    sweeps = "distance,cv-threshold,batch,cost,ablation"
    config = config_of(
        routes,
        iterations=6,
        warmup=2,
        predictor="conditional",
        sweep=sweeps,
        batch_sizes="8,64",
        plots=True,
    )
    result = run_simulate(config)
    values = [(point["sweep"], point["value"]) for point in result["sweeps"]]
    assert values[:2] == [("distance", 1), ("distance", 2)]  # of three layers
    assert values[2:7] == [("cv-threshold", v) for v in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert values[7:] == [("batch", 8), ("batch", 64), ("cost", "linear"), ("cost", "roofline"), ("ablation", "all")]
    replicas = [
        next(r for r in p["balancers"] if r["name"] == "moeless")["replicas_mean"] for p in result["sweeps"][2:7]
    ]
    assert replicas[0] > replicas[-1]  # the paper's Figure 16
    pictures = {path.name for path in config.out.glob("*.png")}
    assert pictures >= {"layer_cdf.png", "comparison.png", "timeline.png", "sweep_batch.png", "ablation.png"}
    print_simulate(result)


def test_switch_of_domain(routes: Path) -> None:
    result = run_simulate(config_of(routes, iterations=80, streams=1_024, scenario="switch", switch="a,b"))
    assert result["switch"]["iteration"] == 40
    assert result["switch"]["settled_after"]["moeless-roofline"] is not None
    with pytest.raises(DataError, match="labelled 'c'; its labels: a, b"):
        run_simulate(config_of(routes, scenario="switch", switch="a,c"))


def test_arrivals_and_phases(routes: Path) -> None:
    arrivals = routes.parent / "azure.csv"
    rows = [f"2023-11-16 18:15:{s:02d}.1000000,200,20" for s in range(0, 50, 2)]
    arrivals.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    result = run_simulate(config_of(routes, streams=None, arrivals=arrivals, batching="second"))
    assert "second batching of azure.csv" in result["routes"]["workload"]
    assert result["balancers"][0]["phases"].keys() == {"decode"}
    assert any("the requests' prompts take no part" in note for note in result["notes"])
    result = run_simulate(config_of(routes, streams=None, rate=5.0, max_batch_tokens=64))
    assert result["routes"]["tokens_per_iteration"] <= 64


def test_counts_are_simulated_as_recorded(routes: Path, tmp_path: Path) -> None:
    path = tmp_path / "counts.safetensors"
    counts = np.random.default_rng(0).integers(0, 40, (20, 2, 32))
    save_trace(path, make_loads(counts, name="counts"))
    result = run_simulate(config_of(path, streams=None, model_shape="gpt-oss-20b"))
    assert result["routes"]["workload"] == "20 iterations as recorded"
    for changes, reason in (
        ({"streams": 8}, "cannot be batched anew"),
        ({"streams": None, "predictor": "conditional"}, "needs a trace with the experts of each token"),
        ({"streams": None, "predictor": "recorded"}, "holds no predicted counts"),
        ({"streams": None, "warmup": 20}, "leaves nothing of the trace's 20 iterations"),
        ({"streams": None, "layers": "2"}, "layer 2 is not in 'counts', which has 2"),
    ):
        with pytest.raises(MoelessError, match=reason):
            run_simulate(config_of(path, model_shape="gpt-oss-20b", **changes))


def test_a_recorded_trace_with_token_ids_can_be_batched_anew(tmp_path: Path) -> None:
    recorder = Recorder(num_layers=2, num_experts=32, num_ranks=1, capacity=60, top_k=4, token_capacity=60 * 8)
    ids = skewed_ids(60 * 8, num_layers=2, num_experts=32, top_k=4).reshape(60, 8, 2, 4)
    for step in ids:
        for layer in range(2):
            counts = np.bincount(step[:, layer].ravel(), minlength=32)
            recorder.record_layer(layer, counts[None], np.ones((32, 1)))
        recorder.record_tokens(step, np.arange(8))
        recorder.end_iteration(phase="decode", num_tokens=8, duration_s=0.1)
    trace = recorder.snapshot("engine", {"top_k": 4})
    assert trace is not None
    save_trace(tmp_path / "t.safetensors", trace)
    recorded = run_simulate(config_of(tmp_path / "t.safetensors", streams=None))
    assert recorded["routes"]["workload"] == "24 iterations as recorded"
    assert recorded["routes"]["tokens_per_iteration"] == 8
    composed = run_simulate(config_of(tmp_path / "t.safetensors", streams=300))
    assert composed["routes"]["workload"] == "300 streams decoding, closed loop"
    assert composed["routes"]["tokens_per_iteration"] == 300


def test_routes_of_another_phase_are_noted(routes: Path) -> None:
    result = run_simulate(config_of(routes, streams=None, prompts=4))
    assert any("recorded in decode" in note for note in result["notes"])
    assert result["balancers"][0]["phases"].keys() == {"prefill"}
    assert not any("recorded in" in note for note in run_simulate(config_of(routes))["notes"])


def test_shapes_and_clusters(routes: Path) -> None:
    result = run_simulate(config_of(routes, model_shape="phi-3.5-moe", cluster="8xa6000"))
    assert any("no number here is a result of phi-3.5-moe" in note for note in result["notes"])
    shape, cluster = routes.parent / "shape.json", routes.parent / "cluster.json"
    shape.write_text('{"num_layers": 3, "num_experts": 32, "top_k": 4, "hidden": 64, "ffn": 128}')
    rates = '"memory_bytes_per_s": 1e12, "flop_per_s": 1e14, "link_bytes_per_s": 1e11, "copy_bytes_per_s": 6.4e10}'
    cluster.write_text('{"num_ranks": 4, ' + rates)
    result = run_simulate(config_of(routes, model_shape=str(shape), cluster=str(cluster)))
    assert result["machine"]["ranks"] == 4
    assert result["machine"]["expert_bytes"] == 3 * 64 * 128 * 2
    cluster.write_text('{"num_ranks": 4.5, ' + rates)
    with pytest.raises(DataError, match="wrong or missing: num_ranks"):
        run_simulate(config_of(routes, cluster=str(cluster)))
    with pytest.raises(UsageError, match="--cluster must be one of 8xa6000, 8xh200"):
        run_simulate(config_of(routes, cluster="9xb300"))
    np.save(routes.parent / "r.npy", skewed_ids(64, num_experts=12))
    with pytest.raises(UsageError, match="give --model-shape"):
        run_simulate(config_of(routes.parent / "r.npy", streams=None))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"streams": 8, "prompts": 2}, "--streams and --prompts exclude each other"),
        ({"batching": "second"}, "--batching has no effect without --arrivals or --rate"),
        ({"iteration_ms": 7.0}, "--iteration-ms has no effect without"),
        (
            {"streams": None, "rate": 1.0, "batching": "second", "max_batch_tokens": 9},
            "no effect with --batching second",
        ),
        ({"switch": "a,b"}, "--scenario switch and --switch FIRST,SECOND need each other"),
        (
            {"scenario": "switch", "switch": "a,b", "streams": None, "rate": 2.0},
            "works with --streams or --prompts only",
        ),
        ({"warmup": 24}, "--warmup 24 leaves nothing of --iterations 24"),
        ({"predictor": "noisy:2"}, r"takes S in \[0, 1\]"),
        ({"predictor": "oracle"}, "--predictor must be one of"),
        ({"balancers": "static,megatron"}, "--balancers takes a comma-separated list out of"),
        ({"batch_sizes": "8"}, "--batch-sizes has no effect without --sweep batch"),
        ({"export_plan": Path("plan.txt")}, "--export-plan must end in .yaml or .json"),
        ({"export_plan": Path("p.json"), "layers": "0"}, "--export-plan needs a plan of all layers"),
        ({"cv_threshold": 0.5, "balancers": "eplb"}, "--cv-threshold has no effect without moeless"),
        ({"export_first_layer": 1}, "--export-first-layer has no effect without --export-plan"),
        ({"export_plan": Path("p.json"), "balancers": "eplb"}, "--export-plan needs moeless-roofline"),
        ({"sweep": "distance"}, "--sweep distance changes nothing with --predictor history"),
        ({"sweep": "cv-threshold", "balancers": "eplb"}, "--sweep cv-threshold needs moeless"),
        ({"predictor": "conditional", "distance": 3}, "--distance 3 leaves no layer to predict: the routes have 3"),
        ({"predictor": "recorded"}, "needs a trace with predicted counts, not one of token ids"),
    ],
)
def test_flags_without_effect_are_refused(routes: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_simulate(config_of(routes, **changes))


def test_command_line(routes: Path) -> None:
    command = [sys.executable, "-m", "moeless", "bench", "simulate", "--routes", str(routes), "--streams", "64"]
    command += ["--iterations", "6", "--warmup", "2", "--no-plots", "--out", str(routes.parent / "cli"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["source"] == "simulated"
    assert done.stderr == ""
    wrong = subprocess.run([*command, "--ranks", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2
    assert "--ranks must be at least 1, got 0" in wrong.stderr
