"""Predictor folders: round trip, refusal of what does not match, loading next to a model without experts."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import HIDDEN, NUM_EXPERTS, NUM_LAYERS, save_tiny_checkpoint, tiny_model

from moeless.config.model import ModelConfig
from moeless.errors import CheckpointError
from moeless.models.checkpoint import load_model
from moeless.models.family import find_moe_layers
from moeless.models.predictor import PredictorSet
from moeless.models.predictor_file import (
    DESCRIPTION,
    TENSORS,
    PredictorEntry,
    TunedWeights,
    fingerprint,
    no_source_entry,
    read_predictors,
    save_predictors,
)
from moeless.models.probe import probe_layers
from moeless.models.weights import load_skeleton


def make_entry(target: int, distance: int, rank: int = 0, *, tuned: bool = True) -> PredictorEntry:
    generator = torch.Generator().manual_seed(100 * distance + target)
    weights = TunedWeights(
        weight_EH=torch.randn(NUM_EXPERTS, HIDDEN, generator=generator),
        down_RH=torch.randn(rank, HIDDEN, generator=generator) if rank else None,
        up_ER=torch.randn(NUM_EXPERTS, rank, generator=generator) if rank else None,
    )
    entry = no_source_entry(target)
    return replace(
        entry,
        source="gate-input" if distance else "pre-attention",
        source_layer=target - distance,
        distance=distance,
        verdict="tuned" if tuned else "kept",
        adapter_rank=rank,
        before=0.5,
        after=0.75,
        weights=weights if tuned else None,
    )


ENTRIES = [make_entry(0, 0, 4), make_entry(1, 1), make_entry(2, 1, 3), make_entry(3, 1, tuned=False), make_entry(2, 2)]


def write(folder: Path, family: str, entries: list[PredictorEntry], seed: int = 0) -> None:
    model = tiny_model(family, seed)
    points = probe_layers(model, find_moe_layers(model), torch.device("cpu"))
    save_predictors(folder, {"base_model": "tiny", "fingerprint": fingerprint(model, points)}, entries)


def load(folder: Path, family: str, seed: int = 0, distance: int | None = None) -> PredictorSet:
    model = tiny_model(family, seed)
    return PredictorSet.load(folder, model=model, layers=find_moe_layers(model), distance=distance)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "mixtral", ENTRIES)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    header, entries = read_predictors(folder)
    assert header["base_model"] == "tiny"
    assert {e.key for e in entries} == {e.key for e in ENTRIES}
    for entry in entries:
        written = next(e for e in ENTRIES if e.key == entry.key)
        assert entry.row() == written.row()
        if written.weights is None:
            assert entry.weights is None
            continue
        assert entry.weights is not None
        assert entry.weights.num_parameters == NUM_EXPERTS * HIDDEN + entry.adapter_rank * (HIDDEN + NUM_EXPERTS)
        for part, tensor in written.weights.tensors.items():
            assert torch.equal(entry.weights.tensors[part], tensor)


def test_distance_chooses_and_first_layers_fall_back_on_their_own_input(folder: Path) -> None:
    near = load(folder, "mixtral")
    assert [(p.source, p.source_layer, p.distance) if p else None for p in near.predictors] == [
        ("pre-attention", 0, 0),
        ("gate-input", 0, 1),
        ("gate-input", 1, 1),
        ("gate-input", 2, 1),
    ]
    assert near.num_parameters == sum(e.weights.num_parameters for e in ENTRIES[:4] if e.weights)
    far = load(folder, "mixtral", distance=2)
    assert [p.distance if p else None for p in far.predictors] == [0, None, 2, None]
    with pytest.raises(CheckpointError, match="no predictors for distance 3, only 0, 1, 2"):
        load(folder, "mixtral", distance=3)


def test_layers_without_a_source_have_no_predictor(tmp_path: Path) -> None:
    write(tmp_path, "mixtral", [no_source_entry(0), make_entry(1, 1)])
    assert load(tmp_path, "mixtral").for_target(0) is None


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2", "llama4_text", "dbrx", "deepseek_v3", "gpt_oss", "afmoe"])
def test_a_model_without_experts_predicts_the_same(family: str, tmp_path: Path) -> None:
    save_tiny_checkpoint(family, tmp_path / "model")
    config = ModelConfig(model=str(tmp_path / "model"), device="cpu")
    loaded = load_model(config)
    model, layers = loaded.model, loaded.layers
    points = probe_layers(model, layers, torch.device("cpu"))
    entries = [make_entry(0, 0), *(make_entry(t, 1, 3) for t in range(1, len(points)))]
    save_predictors(tmp_path / "p", {"fingerprint": fingerprint(model, points), "base_model": "tiny"}, entries)
    skeleton, _ = load_skeleton(config)
    whole = PredictorSet.load(tmp_path / "p", model=model, layers=layers, points=points)
    bare = PredictorSet.load(tmp_path / "p", model=skeleton.model, layers=skeleton.layers)
    x_TH = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))
    for layer in range(len(points)):
        first, second = whole.for_target(layer), bare.for_target(layer)
        assert first is not None
        assert second is not None
        assert torch.equal(first(x_TH), second(x_TH))


def test_another_config_is_refused_naming_the_field(folder: Path) -> None:
    model = tiny_model("mixtral", rope_theta=5e5)
    with pytest.raises(CheckpointError, match=r"another model \('tiny'\): their config_sha256 is"):
        PredictorSet.load(folder, model=model, layers=find_moe_layers(model))
    other = tiny_model("qwen3_moe")
    with pytest.raises(CheckpointError, match="their family is 'mixtral', this model's is 'qwen3_moe'"):
        PredictorSet.load(folder, model=other, layers=find_moe_layers(other))


def test_other_gates_are_refused_and_another_precision_is_not(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="their gates_sha256 is"):
        load(folder, "mixtral", seed=1)
    model = tiny_model("mixtral").to(torch.bfloat16)
    assert PredictorSet.load(folder, model=model, layers=find_moe_layers(model)).for_target(2) is not None


def test_damage_is_named(folder: Path) -> None:
    tensors, description = folder / TENSORS, folder / DESCRIPTION
    whole, text = tensors.read_bytes(), description.read_text()
    tensors.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        read_predictors(folder)
    tensors.write_bytes(whole[:-4] + b"\0\0\1\0")
    with pytest.raises(CheckpointError, match="is not the file that predictors"):
        read_predictors(folder)
    tensors.write_bytes(whole)
    description.write_text(json.dumps({**json.loads(text), "format": "moeless.predictors/9"}))
    with pytest.raises(CheckpointError, match=r"format 'moeless\.predictors/9'"):
        read_predictors(folder)
    description.unlink()
    with pytest.raises(CheckpointError, match=r"has no predictors\.json"):
        read_predictors(folder)


@pytest.mark.parametrize("name", [TENSORS, DESCRIPTION])
def test_any_flipped_bit_is_harmless_or_refused(folder: Path, name: str) -> None:
    """The tensors have a hash, so only the description can be changed without notice, where nothing depends on it."""
    model = tiny_model("mixtral")
    layers = find_moe_layers(model)
    pristine, rng, messages = (folder / name).read_bytes(), random.Random(name), []
    for _ in range(60):
        damaged = bytearray(pristine)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(damaged)
        try:
            PredictorSet.load(folder, model=model, layers=layers)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) == 60 if name == TENSORS else messages
    assert not any("\n" in message for message in messages)


def test_all_layers_of_the_tiny_model_are_covered() -> None:
    assert {e.target_layer for e in ENTRIES} == set(range(NUM_LAYERS))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "phimoe", "qwen3_moe"])
def test_the_documented_reader_predicts_the_same(family: str, tmp_path: Path) -> None:
    """The code in docs/predictors.md runs as it stands, in under 60 lines."""
    text = (Path(__file__).parents[2] / "docs" / "predictors.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert source.count("\n") < 60
    names: dict[str, Any] = {}
    exec(source, names)  # the documentation is the code under test
    write(tmp_path, family, ENTRIES)
    model = tiny_model(family)
    points = probe_layers(model, find_moe_layers(model), torch.device("cpu"))
    routers = [point.layer.router for point in points]
    biases = [getattr(router, "bias", None) for router in routers]
    found = names["load_predictors"](
        tmp_path,
        [router.weight for router in routers],
        points[0].top_k,
        biases if biases[0] is not None else None,
        [point.norm for point in points],
    )
    ours = PredictorSet.load(tmp_path, model=model, layers=find_moe_layers(model), distance=1)
    x_TH = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))
    for layer, key in enumerate([(0, 0), (1, 1), (1, 2), (1, 3)]):
        predictor = ours.for_target(layer)
        assert predictor is not None
        assert torch.equal(predictor(x_TH).sort().values, found[key].predict(x_TH).sort().values)
