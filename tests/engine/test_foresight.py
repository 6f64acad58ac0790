"""Predictors in the engine: they see the router's input, drive plans on all ranks, and change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeless.config.engine import EngineConfig
from moeless.config.model import ModelConfig
from moeless.engine.foresight import load_foresight
from moeless.errors import CheckpointError, UsageError
from moeless.models.checkpoint import load_model
from moeless.models.predictor_file import PredictorEntry, fingerprint, no_source_entry, save_predictors
from moeless.models.probe import probe_layers
from tests.engine.ranks import RankPool
from tests.engine.serving import greedy, greedy_reference, random_prompts, run_engine
from tests.tiny import HIDDEN, NUM_LAYERS, VOCAB, save_tiny_checkpoint


def kept(target: int, distance: int) -> PredictorEntry:
    """The untouched router of `target`."""
    return PredictorEntry(
        source="gate-input",
        source_layer=target - distance,
        target_layer=target,
        distance=distance,
        verdict="kept",
        loss=None,
        adapter_rank=0,
        before=0.9,
        after=0.9,
        metrics_before={},
        metrics_after={},
        seconds=0.0,
    )


def save_folder(folder: Path, checkpoint: Path, entries: list[PredictorEntry]) -> None:
    loaded = load_model(ModelConfig(model=str(checkpoint)))
    points = probe_layers(loaded.model, loaded.layers, torch.device("cpu"))
    save_predictors(folder, {"base_model": "tiny", "fingerprint": fingerprint(loaded.model, points)}, entries)


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gemma4_text"])
def test_a_predictor_reads_what_the_earlier_router_read(tmp_path: Path, family: str) -> None:
    options = {"vocab_size_per_layer_input": VOCAB} if family == "gemma4_text" else {}
    save_tiny_checkpoint(family, tmp_path / "model", **options)
    entries = [no_source_entry(0), *(kept(target, 1) for target in range(1, NUM_LAYERS))]
    save_folder(tmp_path / "predictors", tmp_path / "model", entries)
    loaded = load_model(ModelConfig(model=str(tmp_path / "model")))
    predicts, distance = load_foresight(tmp_path / "predictors", loaded, None)
    assert distance == 1
    assert predicts[0] is None
    inputs: list[Any] = []
    for layer in loaded.layers:
        layer.router.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args or (kwargs["hidden_states"],), kwargs)), with_kwargs=True
        )
    loaded.model(torch.arange(3, 12)[None])
    read = [args[0].reshape(-1, HIDDEN) for args, _ in inputs]
    unread = torch.full((9, HIDDEN), float("nan"))  # the experts' own input is not looked at
    found = [predict(unread) for predict in predicts if predict is not None]
    expected = [loaded.layers[target].route(read[target - 1]) for target in range(1, NUM_LAYERS)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


@pytest.mark.parametrize("balancer", ["moeless", "moeless-roofline"])
def test_predicted_plans_on_two_ranks_leave_tokens_as_they_are(ranks: RankPool, tmp_path: Path, balancer: str) -> None:
    model = save_tiny_checkpoint("mixtral", tmp_path / "model")
    entries = [no_source_entry(0), no_source_entry(1), *(kept(target, 2) for target in range(2, NUM_LAYERS))]
    save_folder(tmp_path / "predictors", tmp_path / "model", entries)
    prompts = random_prompts((9, 14, 30), VOCAB)
    results = ranks.run(
        run_engine,
        2,
        config={
            "model": str(tmp_path / "model"),
            "predictors": str(tmp_path / "predictors"),
            "balancer": balancer,
            "kv_tokens": 512,
        },
        prompts=prompts,
        params=[greedy(12, ignore_eos=True)] * 3,
        owners=[0, 1, 1],
        starts=[0, 0, 2],
    )
    made = {i: list(output.token_ids) for done, _ in results for i, output in done.items()}
    assert [made[i] for i in range(3)] == greedy_reference(model, prompts, 12)
    plans = [statistics["experts"]["plans"] for _, statistics in results]
    assert plans[0] == plans[1]
    assert plans[0]["predicted"] > 0
    assert plans[0]["failed"] == 0


def test_a_folder_for_another_model_and_useless_flags_are_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path / "model")
    save_tiny_checkpoint("olmoe", tmp_path / "other")
    save_folder(tmp_path / "predictors", tmp_path / "model", [kept(target, 1) for target in range(1, NUM_LAYERS)])
    other = load_model(ModelConfig(model=str(tmp_path / "other")))
    with pytest.raises(CheckpointError, match="made for another model"):
        load_foresight(tmp_path / "predictors", other, None)
    model = load_model(ModelConfig(model=str(tmp_path / "model")))
    with pytest.raises(CheckpointError, match="no predictors for distance 3, only 1"):
        load_foresight(tmp_path / "predictors", model, 3)
    save_folder(tmp_path / "empty", tmp_path / "model", [no_source_entry(0)])
    with pytest.raises(UsageError, match="none of its predictors reads the router input"):
        load_foresight(tmp_path / "empty", model, None)
    with pytest.raises(UsageError, match="--predictors has no effect with --balancer eplb"):
        EngineConfig(model="m", predictors="p", balancer="eplb", ep=2)
    with pytest.raises(UsageError, match="--distance 2 has no effect without --predictors"):
        EngineConfig(model="m", distance=2)
