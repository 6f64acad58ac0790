"""Fine-tuning end to end on small random models, and the promises of its parts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny import HIDDEN, NUM_EXPERTS, TOP_K, save_tiny_checkpoint
from typer.testing import CliRunner

from moeless.cli import app
from moeless.config.finetune import FinetuneConfig
from moeless.config.profile import ProfileConfig
from moeless.errors import UsageError
from moeless.models.checkpoint import load_model
from moeless.models.predictor_file import read_predictors
from moeless.train import pairs as pairs_module
from moeless.train.accuracy import Judge
from moeless.train.capture import capture_batches
from moeless.train.finetune import capture_rows, run_finetune
from moeless.train.inputs import SourceRows, held_out_iterations, log_scores
from moeless.train.pairs import Captured, Pair, PairTuner, plan_pairs
from moeless.train.profiling import open_store, prepare_work, run_profile
from moeless.train.rows import DECODE, PREFILL
from moeless.train.tuner import Recipe, auto_ranks, promoe_parameters


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    save_tiny_checkpoint("deepseek_v3", folder / "model")
    rng = np.random.default_rng(0)
    rows = [{"token_ids": rng.integers(3, 128, size=int(n)).tolist()} for n in rng.integers(20, 60, size=40)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def make_config(folder: Path, out: Path, **changes: Any) -> FinetuneConfig:
    values: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "data.jsonl"),
        "device": "cpu",
        "max_tokens": 1200,
        "decode_tokens": 64,
        "max_length": 64,
        "batch_tokens": 128,
        "epochs": 2,
        "threshold": 1.0,
        "out": out,
    }
    return FinetuneConfig(**{**values, **changes})


def tune(config: FinetuneConfig) -> dict[str, Any]:
    result = run_finetune(config)
    assert result is not None
    return result


def capture(folder: Path, tmp_path: Path) -> Captured:
    config = make_config(folder, tmp_path)
    return capture_rows(config, load_model(config), None, Accelerator(cpu=True))[0]


def test_threshold_zero_trains_nothing(model_folder: Path, tmp_path: Path) -> None:
    result = tune(make_config(model_folder, tmp_path, threshold=0.0, distance="1,2"))
    assert {row["verdict"] for row in result["layers"]} == {"kept"}
    assert all(row["before"] == row["after"] and row["loss"] is None for row in result["layers"])
    assert result["bytes"] == result["num_parameters"] == 0


def test_an_unreachable_threshold_tries_every_layer_and_makes_none_worse(model_folder: Path, tmp_path: Path) -> None:
    result = tune(make_config(model_folder, tmp_path, distance="1,2"))
    rows = result["layers"]
    assert [(r["source"], r["distance"], r["target_layer"]) for r in rows] == [
        ("pre-attention", 0, 0),
        ("pre-attention", 0, 1),
        ("gate-input", 1, 1),
        ("gate-input", 1, 2),
        ("gate-input", 2, 2),
    ]
    assert all(row["loss"] in ("soft", "hard") for row in rows)
    assert all(row["after"] >= row["before"] for row in rows)
    assert any(row["after"] > row["before"] for row in rows if row["verdict"].startswith("tuned"))
    header, entries = read_predictors(tmp_path)
    assert header["num_tokens"] == result["num_tokens"]
    assert {k: v for k, v in json.loads((tmp_path / "finetune.json").read_text()).items() if k == "layers"} == {
        "layers": rows
    }
    assert sum(e.weights.num_bytes for e in entries if e.weights) == result["bytes"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["finetune.json", "predictors.json", "predictors.safetensors"]


def test_rank_zero_is_exactly_one_copy_of_the_gate(model_folder: Path, tmp_path: Path) -> None:
    run_finetune(make_config(model_folder, tmp_path, adapter_rank="0", loss="hard"))
    _, entries = read_predictors(tmp_path)
    weights = [e.weights for e in entries if e.weights]
    assert weights
    assert all(w.num_parameters == NUM_EXPERTS * HIDDEN and w.rank == 0 for w in weights)
    assert {e.loss for e in entries} <= {"hard", None}


def test_the_same_seed_gives_the_same_predictors(model_folder: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        run_finetune(make_config(model_folder, folder))
    first, second = ((folder / "predictors.safetensors").read_bytes() for folder in folders)
    assert first == second


def test_an_interrupted_run_goes_on(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune(make_config(model_folder, tmp_path / "whole"))
    original, done = PairTuner.tune, []

    def interrupted(self: PairTuner, deadline_s: float = math.inf) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(self.pair.key)
        return original(self, deadline_s)

    config = make_config(model_folder, tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(PairTuner, "tune", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_finetune(config)
        assert not (config.out / "predictors.json").exists()
    left: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(PairTuner, "tune", lambda self, d=math.inf: (left.append(self.pair.key), original(self, d))[1])
        resumed = tune(config)
    assert len(done) == 2
    assert not set(left) & set(done)
    assert len(left) + len(done) == len(whole["layers"])
    names = [tmp_path / name / "predictors.safetensors" for name in ("whole", "cut")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert [row["after"] for row in resumed["layers"]] == [row["after"] for row in whole["layers"]]


def test_processes_share_the_layers_and_give_the_same_predictors(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(model_folder, tmp_path / "alone")
    run_finetune(config)
    flags = ["max_tokens", "decode_tokens", "max_length", "batch_tokens", "epochs", "threshold", "device", "data"]
    arguments = [a for name in flags for a in ("--" + name.replace("_", "-"), str(getattr(config, name)))]
    folders = ["--capture", str(tmp_path / "capture"), "--out", str(tmp_path / "shared")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "moeless", "finetune", config.model, *arguments, *folders, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == 1
    names = [tmp_path / name / "predictors.safetensors" for name in ("alone", "shared")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_other_settings_do_not_reuse_finished_layers(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PairTuner.tune

    def cut(self: PairTuner, deadline_s: float = math.inf) -> Any:
        if self.pair.target == 2:
            raise KeyboardInterrupt
        return original(self, deadline_s)

    with monkeypatch.context() as patch:
        patch.setattr(PairTuner, "tune", cut)
        with pytest.raises(KeyboardInterrupt):
            run_finetune(make_config(model_folder, tmp_path))
    result = tune(make_config(model_folder, tmp_path, threshold=0.0))
    assert {row["verdict"] for row in result["layers"]} == {"kept"}


def test_pre_attention_covers_all_layers(model_folder: Path, tmp_path: Path) -> None:
    result = tune(make_config(model_folder, tmp_path, source="pre-attention"))
    assert [(r["source"], r["source_layer"], r["target_layer"]) for r in result["layers"]] == [
        ("pre-attention", t, t) for t in range(3)
    ]


def test_a_capture_is_reused_and_profile_measures_the_result(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(model_folder, tmp_path / "p", capture=tmp_path / "capture")
    shared = {name: getattr(config, name) for name in ("model", "data", "device", "max_tokens", "decode_tokens")}
    shared |= {"max_length": 64, "batch_tokens": 128, "capture": config.capture, "out": tmp_path / "profile"}
    run_profile(ProfileConfig(distance="1", **shared))
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "capture").iterdir()}
    tuned = tune(config)
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "capture").iterdir()}
    result = run_profile(ProfileConfig(distance="1", predictors=tmp_path / "p", **shared))
    rows = {(r["predictor"], r["phase"], r["distance"], r["target_layer"]): r for r in result["rows"]}
    for row in tuned["layers"]:
        measured = rows["tuned", "prefill", row["distance"], row["target_layer"]]
        if row["distance"] and row["verdict"] == "rejected":
            gate = rows["gate", "prefill", row["distance"], row["target_layer"]]
            assert measured["token_recall"] == gate["token_recall"]
        assert 0 < measured["token_recall"] <= 1
    assert any("tuned on documents of this corpus" in note for note in result["data"]["notes"])


def test_time_limit_still_gives_every_layer_a_verdict(model_folder: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    result = tune(make_config(model_folder, tmp_path, epochs=10_000, max_seconds=1.0, distance="1"))
    assert len(result["layers"]) == 3
    assert all(row["after"] >= row["before"] for row in result["layers"])
    assert time.monotonic() - began < 60


def test_a_spilled_capture_gives_the_same_rows_in_bounded_pages(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(model_folder, tmp_path)
    loaded = load_model(config)
    _, documents, work = prepare_work(config, loaded)
    whole, _ = capture_rows(config, loaded, None, Accelerator(cpu=True))
    store = open_store(config, loaded, documents, ("layer_input",), work, None, budget_bytes=50_000)
    for _ in capture_batches(loaded, whole.points, work, channels=("layer_input",), seed=0, store=store):
        pass
    spilled = Captured.split_up(
        whole.points, store, seed=0, batch_tokens=config.batch_tokens, device=torch.device("cpu")
    )
    rows = SourceRows(store, "gate_input", 1, budget_bytes=70_000, device=torch.device("cpu"))
    pages = list(rows.pages())
    assert len(pages) > 2
    assert all(page.numel() * page.element_size() <= 70_000 for _, page in pages)
    assert [first for first, _ in pages] == np.cumsum([0, *(len(page) for _, page in pages)])[:-1].tolist()
    assert torch.equal(torch.cat([page for _, page in pages]), whole.store.column("gate_input", 1))
    recipe = Recipe(rank=None, loss="auto", epochs=1, threshold=1.0, seed=0)
    pair = Pair(source="gate-input", target=1, distance=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs_module, "PAGE_BYTES", 70_000)
        small = PairTuner(spilled, pair, recipe, "token_recall", Accelerator(cpu=True)).tune()
    large = PairTuner(whole, pair, recipe, "token_recall", Accelerator(cpu=True)).tune()
    assert small.before == large.before
    assert small.after is not None
    assert small.before is not None
    assert small.after >= small.before
    store.close()


def test_reported_accuracy_is_that_of_the_test_part_alone(model_folder: Path, tmp_path: Path) -> None:
    """Recomputed by hand from the untouched router on rows whose documents neither trained nor selected."""
    captured = capture(model_folder, tmp_path)
    pair = Pair(source="gate-input", target=2, distance=1)
    recipe = Recipe(rank=0, loss="soft", epochs=1, threshold=0.0, seed=0)
    entry = PairTuner(captured, pair, recipe, "token_recall", Accelerator(cpu=True)).tune()
    documents = captured.store.column("documents")
    test = captured.split.test
    assert not set(documents[test].tolist()) & set(documents[~test].tolist())
    predicted = captured.points[2].route(captured.store.column("gate_input", 1)[test])
    actual = captured.store.column("ids", 2)[test]
    hits = [len(set(p) & set(a)) / TOP_K for p, a in zip(predicted.tolist(), actual.tolist(), strict=True)]
    assert entry.before == pytest.approx(np.mean(hits))


def test_held_out_prefill_is_packed_anew_and_decode_keeps_its_steps() -> None:
    phases = np.array([PREFILL] * 5 + [DECODE] * 4, np.uint8)
    iterations, _ = held_out_iterations(phases, np.array([0, 0, 3, 3, 9, 20, 21, 21, 20]), batch_tokens=2)
    assert iterations.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 3]


def test_history_is_what_earlier_iterations_of_the_phase_say(model_folder: Path, tmp_path: Path) -> None:
    captured = capture(model_folder, tmp_path)
    judge = Judge(captured.store, captured.split.test, batch_tokens=32)
    actual_IE = judge.loads(captured.ids(1)[judge.rows_N].numpy(), NUM_EXPERTS)
    seen_IE = judge.history(actual_IE, np.arange(NUM_EXPERTS), window=2)
    assert seen_IE[0].tolist() == list(range(NUM_EXPERTS))
    assert seen_IE[1].tolist() == actual_IE[0].tolist()
    assert seen_IE[3].tolist() == (actual_IE[1] + actual_IE[2]).tolist()


def test_log_scores_are_the_routers_normalised_scores() -> None:
    logits = torch.randn(7, NUM_EXPERTS)
    sigmoid = logits.sigmoid()
    torch.testing.assert_close(log_scores(logits, "sigmoid").exp(), sigmoid / sigmoid.sum(-1, keepdim=True))
    torch.testing.assert_close(log_scores(logits, "softmax").exp(), logits.softmax(-1))


def test_automatic_ranks_stay_within_two_percent_of_promoe() -> None:
    assert promoe_parameters(4096, 8) == 5_253_128
    assert auto_ranks(4096, 8) == (16,)
    for hidden, experts in ((128, 16), (4096, 8), (1024, 8)):
        for rank in auto_ranks(hidden, experts):
            assert experts * hidden + rank * (hidden + experts) <= 0.02 * promoe_parameters(hidden, experts)
    assert auto_ranks(2048, 64) == (16,)


def test_plan_pairs() -> None:
    assert [(p.key, p.source) for p in plan_pairs((2,), 4)] == [
        ("d0.layer0", "pre-attention"),
        ("d0.layer1", "pre-attention"),
        ("d2.layer2", "gate-input"),
        ("d2.layer3", "gate-input"),
    ]
    assert [p.key for p in plan_pairs((1,), 3, has_layer_input=False)] == ["d1.layer1", "d1.layer2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distance": "1", "source": "pre-attention"}, "--distance 1 has no effect with --source pre-attention"),
        ({"adapter_rank": "x"}, "--adapter-rank must be auto or a number from 0 to 4096, got 'x'"),
        ({"threshold": 1.5}, r"--threshold must be at most 1, got 1\.5"),
        ({"loss": "both"}, "--loss must be one of auto, soft, hard, got 'both'"),
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
    ],
)
def test_wrong_flags_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        make_config(tmp_path, tmp_path, **changes)


def test_distance_beyond_the_depth(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--distance 3 needs more than 3 MoE layers"):
        run_finetune(make_config(model_folder, tmp_path, distance="3"))


def test_command_line(model_folder: Path, tmp_path: Path) -> None:
    arguments = [str(model_folder / "model"), "--data", str(model_folder / "data.jsonl"), "--device", "cpu"]
    arguments += ["--max-tokens", "400", "--decode-tokens", "0", "--epochs", "1", "--out", str(tmp_path / "p")]
    done = CliRunner().invoke(app, ["finetune", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["schema"] == "moeless.finetune/1"
    assert {"layers", "seconds_total", "num_parameters", "bytes"} <= set(result)
    shown = CliRunner().invoke(app, ["finetune", *arguments])
    assert shown.exit_code == 0
    assert "verdict" in shown.stdout
