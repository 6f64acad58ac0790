"""`bench predictors` end to end on a small random model, and the ProMoE baseline's net."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import save_tiny_checkpoint

from moeless.bench.predictors import run_bench_predictors
from moeless.bench.predictors_report import print_predictors
from moeless.bench.predictors_timing import microseconds
from moeless.config.predictors import PREDICTORS, PredictorsConfig
from moeless.errors import UsageError
from moeless.train.promoe import ProMoeNet
from moeless.train.tuner import promoe_parameters

KEYS = {"predictor", "distance", "token_recall", "exact_set", "load_accuracy", "straggler_recall", "pearson"}
KEYS |= {"num_parameters", "bytes", "fit_seconds", "predict_us"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("predictors")
    save_tiny_checkpoint("mixtral", folder / "model")
    rng = np.random.default_rng(0)
    rows = [{"token_ids": rng.integers(3, 128, size=40).tolist()} for _ in range(30)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return run_bench_predictors(
        PredictorsConfig(
            model=str(folder / "model"),
            data=str(folder / "data.jsonl"),
            device="cpu",
            distance="1,2",
            max_tokens=1000,
            decode_tokens=64,
            max_length=64,
            batch_tokens=128,
            epochs=1,
            promoe_epochs=1,
            capture=folder / "capture",
            out=folder / "out",
        )
    )


def test_every_predictor_has_a_row_at_every_distance(result: dict[str, list[dict[str, object]]]) -> None:
    rows = {(row["predictor"], row["distance"]): row for row in result["rows"]}
    assert {(name, distance) for name in PREDICTORS for distance in (1, 2)} <= set(rows)
    assert {name for name, distance in rows if distance == 0} == {"gate", "history", "actual", "tuned-plain", "tuned"}
    assert all(set(row) >= KEYS for row in rows.values())
    assert all(row["num_layers"] == (4 if distance == 0 else 4 - distance) for (_, distance), row in rows.items())


def test_the_truth_is_the_bound_and_tuning_harms_no_layer(result: dict[str, list[dict[str, float]]]) -> None:
    layers = {(row["predictor"], row["distance"], row["target_layer"]): row for row in result["layers"]}
    for (name, distance, target), row in layers.items():
        if name == "actual":
            assert row["token_recall"] == row["exact_set"] == row["load_accuracy"] == row["straggler_recall"] == 1
        if name in ("tuned", "tuned-plain"):
            assert row["token_recall"] >= layers["gate", distance, target]["token_recall"]
    means = [row for row in result["rows"] if row["predictor"] == "gate" and row["distance"] == 1]
    expected = np.mean([row["token_recall"] for (n, d, _), row in layers.items() if (n, d) == ("gate", 1)])
    assert means[0]["token_recall"] == pytest.approx(expected)


def test_sizes(result: dict[str, list[dict[str, int]]]) -> None:
    for row in result["rows"]:
        if row["predictor"] in ("promoe", "promoe-ce"):
            assert row["num_parameters"] == row["num_layers"] * promoe_parameters(64, 8)
            assert row["bytes"] == 4 * row["num_parameters"]
    for row in result["layers"]:
        if row["predictor"] == "tuned-plain":
            assert row["num_parameters"] in (0, 64 * 8)


def test_tables_and_pictures(result: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    print_predictors(result)
    shown = capsys.readouterr().out
    assert all(name in shown for name in PREDICTORS)
    assert {Path(p).name for p in result["pictures"]} == {"layers.png", "distances.png", "sizes.png", "density.png"}
    assert all(Path(p).stat().st_size > 5_000 for p in result["pictures"])
    written = json.loads((Path(result["pictures"][0]).parent / "predictors.json").read_text())
    assert written["source"] == "live"


def test_promoe_net_has_the_published_size() -> None:
    net = ProMoeNet(64, {3: 8})
    assert sum(p.numel() for p in net.parameters()) == promoe_parameters(64, 8)
    assert net.eval().predict(torch.randn(5, 64), 3, 2).shape == (5, 2)


def test_timing_leaves_out_batches_that_are_not_there() -> None:
    assert set(microseconds(lambda x: x.topk(2).indices, torch.randn(70, 16))) == {"1", "64"}


def test_unknown_predictor_is_named() -> None:
    with pytest.raises(UsageError, match="--predictors takes a comma-separated list out of gate, "):
        PredictorsConfig(model="m", predictors="gate,magic")
