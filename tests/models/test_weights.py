"""Skeleton loading and single experts against the models they were saved from, for every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moeless.config.model import ModelConfig
from moeless.errors import CheckpointError, UsageError
from moeless.models.expert_ffn import ExpertFfn
from moeless.models.expert_store import ExpertStore
from moeless.models.family import find_moe_layers, supports_packing
from moeless.models.weights import load_skeleton
from tests.tiny import FAMILIES, HIDDEN, NUM_EXPERTS, save_tiny_checkpoint, tiny_model

torch.set_num_threads(1)


def put_back(store: ExpertStore, layer: int, experts: torch.nn.Module) -> None:
    """Give an emptied experts module all its parameters again, read expert by expert."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in store.shapes}
    for expert in range(store.num_experts):
        slot = {name: torch.full(shape, torch.nan) for name, shape in store.shapes.items()}
        store.read_into(layer, expert, slot)
        reference = store.read_reference(layer, expert)
        for name, value in slot.items():
            torch.testing.assert_close(value, reference[name], rtol=0, atol=0)
            parts[name].append(value)
    for name, values in parts.items():
        owner, _, leaf = name.rpartition(".")
        whole = torch.cat(values) if owner == "mlp" else torch.stack(values)  # dbrx keeps [E*F, H]
        experts.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(whole, requires_grad=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_skeleton_and_experts_are_the_saved_model(family: str, tmp_path: Path) -> None:
    model = save_tiny_checkpoint(family, tmp_path)
    loaded, store = load_skeleton(ModelConfig(model=str(tmp_path)))
    for layer in loaded.layers:
        assert not list(layer.experts.parameters())
    assert not any(p.is_meta for p in [*loaded.model.parameters(), *loaded.model.buffers()])
    for layer in loaded.layers:
        put_back(store, layer.ordinal, layer.experts)
    own, saved = loaded.model.state_dict(), model.state_dict()
    assert own.keys() == saved.keys()
    for name, value in saved.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=0, msg=name)
    ids = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(0))
    atol = 0 if supports_packing(model) else 1e-5  # recurrent scans round by the alignment of their weights
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=0, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_computes_what_the_module_computes(family: str) -> None:
    layer = find_moe_layers(tiny_model(family))[0]
    ffn = ExpertFfn(layer.experts)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for expert in (0, NUM_EXPERTS - 1):
        weights = {}
        for name, parameter in layer.experts.named_parameters():
            rows = parameter.shape[0] // NUM_EXPERTS
            part = parameter[expert * rows : (expert + 1) * rows]
            weights[name] = part[0] if rows == 1 else part
        with torch.no_grad():
            actual = ffn(x, weights)
            if family == "llama4_text":  # runs all experts, on as many rows each
                expected = layer.experts(x.repeat(NUM_EXPERTS, 1)).view(NUM_EXPERTS, 5, HIDDEN)[expert]
            else:
                expected = layer.experts(x, torch.full((5, 1), expert), torch.ones(5, 1))
        torch.testing.assert_close(actual, expected.view(5, HIDDEN), rtol=1e-5, atol=1e-6)


def test_precision_follows_the_whole_model_loader(tmp_path: Path) -> None:
    save_tiny_checkpoint("deepseek_v3", tmp_path)  # keeps its gates in fp32
    loaded, store = load_skeleton(ModelConfig(model=str(tmp_path), dtype="bfloat16"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    own = loaded.model.state_dict()
    assert {value.dtype for value in own.values()} == {torch.bfloat16, torch.float32}
    for name, value in own.items():
        assert value.dtype == whole[name].dtype, name
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
    assert store.dtype == torch.bfloat16


def test_generation_defaults_follow_the_whole_model_loader(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9], "do_sample": true, "top_p": 0.9}')
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    loaded, _ = load_skeleton(ModelConfig(model=str(tmp_path)))
    assert loaded.model.generation_config.to_dict() == whole.to_dict()
    assert whole.eos_token_id == [5, 9]
    (tmp_path / "generation_config.json").unlink()
    loaded, _ = load_skeleton(ModelConfig(model=str(tmp_path)))
    assert loaded.model.generation_config.eos_token_id == loaded.model.config.eos_token_id


def test_stacked_experts_are_views_of_the_file(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path)
    _, store = load_skeleton(ModelConfig(model=str(tmp_path)))
    views = store.views(0, 3)
    assert [len(pieces) for pieces in views.values()] == [2, 1]
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in lines if str(tmp_path) in line]
    for piece in (piece for pieces in views.values() for piece in pieces):
        assert any(low <= piece.data_ptr() < high for low, high in spans)


def drop_tensor(folder: Path, *parts: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(key for key in tensors if all(part in key for part in parts))]
    save_file(tensors, folder / "model.safetensors")


def test_a_checkpoint_without_one_experts_weights_is_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path, max_shard_size="100MB")
    drop_tensor(tmp_path, "layers.2", "experts.5")
    with pytest.raises(CheckpointError, match=r"has 7 of the 8 tensors.*layers\.2"):
        load_skeleton(ModelConfig(model=str(tmp_path)))


def test_a_checkpoint_without_a_router_is_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path, max_shard_size="100MB")
    drop_tensor(tmp_path, "layers.1", "gate.weight")
    with pytest.raises(CheckpointError, match=r"lacks 1 weights.*layers\.1"):
        load_skeleton(ModelConfig(model=str(tmp_path)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        load_skeleton(ModelConfig(model=str(tmp_path)))


def test_device_map_is_for_whole_models(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path)
    with pytest.raises(UsageError, match="device-map"):
        load_skeleton(ModelConfig(model=str(tmp_path), device_map="auto"))
