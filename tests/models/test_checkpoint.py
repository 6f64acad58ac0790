"""Loading: sharded checkpoints, and every kind of damage named before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import save_tiny_checkpoint

from moeless.config.model import ModelConfig
from moeless.errors import CheckpointError, UnsupportedModelError, UsageError
from moeless.models.checkpoint import load_model
from moeless.models.shards import INDEX_FILE


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tiny_checkpoint("mixtral", folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


def load_error(folder: Path | str, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(ModelConfig(model=str(folder), **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_checkpoint_loads_without_tokenizer(folder: Path) -> None:
    loaded = load_model(ModelConfig(model=str(folder)))
    assert loaded.tokenizer is None
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert len(loaded.layers) == 4


def test_dtype_can_be_chosen(folder: Path) -> None:
    assert load_model(ModelConfig(model=str(folder), dtype="bfloat16")).model.dtype == torch.bfloat16


def test_missing_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name}' is missing" in load_error(folder)


def test_truncated_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert f"{shard.name}' is truncated" in load_error(folder)
    shard.write_bytes(shard.read_bytes()[:5])
    assert f"{shard.name}' is truncated" in load_error(folder)


def test_damaged_header_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    shard.write_bytes(content)
    assert f"{shard.name}' is damaged" in load_error(folder)


def test_index_that_does_not_match_its_files(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    name = next(iter(index["weight_map"]))
    others = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})
    index["weight_map"][name] = others[0]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert f"lacks '{name}'" in load_error(folder)
    index["weight_map"][name] = "../elsewhere.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert "files outside the folder" in load_error(folder)
    (folder / INDEX_FILE).write_text("{")
    assert "not JSON" in load_error(folder)


def test_architecture_with_more_weights_than_the_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    assert "weights of its architecture" in load_error(folder)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX_FILE]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in load_error(folder)


def test_paths_that_are_not_there_are_never_sent_to_a_hub(folder: Path, tmp_path: Path) -> None:
    for name in (str(tmp_path / "no"), "./no", "no", "a/b/c", "tests/no"):
        assert "does not exist" in load_error(name)
    (tmp_path / "file").write_text("")
    assert "is a file" in load_error(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in load_error(tmp_path / "empty")


def test_hub_id_without_a_connection_is_one_line() -> None:
    assert "someone/some-model" in load_error("someone/some-model")


def test_remote_code_is_not_run_unasked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "evil.Config"}}))
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        load_model(ModelConfig(model=str(folder)))


def test_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "cannot read the tokenizer" in load_error(folder)


def test_flags_without_effect(folder: Path) -> None:
    with pytest.raises(UsageError, match="--revision"):
        load_model(ModelConfig(model=str(folder), revision="main"))
    with pytest.raises(UsageError, match="--offload-dir has no effect"):
        ModelConfig(model=str(folder), offload_dir="x")
    with pytest.raises(UsageError, match="--device cpu has no effect"):
        ModelConfig(model=str(folder), device_map="auto", device="cpu")


def test_device_that_is_not_there(folder: Path) -> None:
    assert "device 'cuda:99'" in load_error(folder, device="cuda:99")
    assert "device 'gpu'" in load_error(folder, device="gpu")


def test_model_larger_than_its_memory_runs_from_disk(demo_model: Path, tmp_path: Path) -> None:
    offloaded = load_model(
        ModelConfig(model=str(demo_model), device_map="auto", cpu_memory_gb=0.02, offload_dir=str(tmp_path / "offload"))
    )
    assert "disk" in set(offloaded.model.hf_device_map.values())
    whole = load_model(ModelConfig(model=str(demo_model)))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(offloaded.model(ids).logits, whole.model(ids).logits)
