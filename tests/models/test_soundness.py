"""Damaged and tampered checkpoints: refused by name, in one line, by both loaders and by the command line."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeless.config.model import ModelConfig
from moeless.engine.request import sampling_defaults
from moeless.errors import CheckpointError, MoelessError
from moeless.models.checkpoint import load_model
from moeless.models.shards import INDEX_FILE, read_header
from moeless.models.weights import load_skeleton
from tests.tiny import save_tiny_checkpoint

torch.set_num_threads(1)

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A small checkpoint of many shards with everything that a checkpoint may have."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tiny_checkpoint("mixtral", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model / name, folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoint"))


def config(**values: Any) -> Damage:
    """Other values in config.json."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def text(name: str, content: str) -> Damage:
    """Another content of a file."""
    return lambda folder: (folder / name).write_text(content) and None


def header(tensor: str, **values: Any) -> Damage:
    """Other values in the header of the shard that has `tensor`."""

    def damage(folder: Path) -> None:
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        path = folder / next(file for name, file in weight_map.items() if name.endswith(tensor))
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + size])
        next(entry for name, entry in head.items() if name.endswith(tensor)).update(values)
        new = json.dumps(head).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])

    return damage


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another weight_map."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX_FILE).read_text())
        change(content["weight_map"])
        (folder / INDEX_FILE).write_text(json.dumps(content))

    return damage


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def exchange(folder: Path) -> None:
    first, second = shards(folder)[3:5]
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def exchange_alike(folder: Path) -> None:
    """Two shards that hold tensors of the same shapes: only their names tell."""
    heads = {path: [entry["shape"] for entry in read_header(path).values()] for path in shards(folder)}
    first, second = next((a, b) for a in heads for b in heads if a < b and heads[a] == heads[b])
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


KINDS: dict[str, tuple[Damage, str]] = {
    "truncated": (
        lambda folder: shards(folder)[2].write_bytes(shards(folder)[2].read_bytes()[:-9]) and None,
        "truncat",
    ),
    "longer": (
        lambda folder: shards(folder)[2].write_bytes(shards(folder)[2].read_bytes() + b"xx") and None,
        "damaged",
    ),
    "empty": (lambda folder: shards(folder)[2].write_bytes(b"") or None, "00003-of-00015.safetensors' is truncated"),
    "missing": (lambda folder: shards(folder)[2].unlink(), "00003-of-00015.safetensors' is missing"),
    "exchanged": (exchange, "which model.safetensors.index.json says is in it"),
    "exchanged-alike": (exchange_alike, "which model.safetensors.index.json says is in it"),
    "header-shape": (header("q_proj.weight", shape=[32, 128]), r"q_proj\.weight' has the shape \[32, 128\] where"),
    "header-length": (header("q_proj.weight", shape=[64, 63]), "bad header"),
    "header-negative": (header("q_proj.weight", shape=[-64, -64]), "bad header"),
    "header-overlap": (header("experts.3.w1.weight", data_offsets=[0, 24576]), "bad header"),
    "header-kind": (header("experts.3.w1.weight", dtype="F31"), "bad header"),
    "header-integers": (header("experts.3.w1.weight", dtype="I32"), r"experts\.3\.w1\.weight' has integers"),
    "gate-turned": (header("gate.weight", shape=[64, 8]), r"gate\.weight' has the shape \[64, 8\] where \[8, 64\]"),
    "expert-turned": (header("experts.3.w1.weight", shape=[64, 96]), r"experts\.3\.w1\.weight' has the shape"),
    "expert-flat": (header("experts.0.w2.weight", shape=[6144]), r"experts\.0\.w2\.weight' has the shape"),
    "index-of-nothing": (index(lambda m: m.update({"model.x": next(iter(m.values()))})), "lacks 'model.x'"),
    "index-of-numbers": (index(lambda m: m.update({"lm_head.weight": 3})), "names files outside the folder"),
    "index-empty": (index(lambda m: m.clear()), "it has no weight_map"),
    "config-text": (text("config.json", '{"model_type": "mix'), r"config\.json' is damaged: not JSON"),
    "config-narrow": (config(hidden_size=32), r"lm_head\.weight' has the shape \[128, 64\] where \[128, 32\]"),
    "config-wide": (config(hidden_size=10**9), r"lm_head\.weight' has the shape"),
    "config-expert": (config(intermediate_size=48), "config.json says"),
    "config-experts": (config(num_local_experts=16), r"gate\.weight' has the shape \[8, 64\] where \[16, 64\]"),
    "config-layers": (config(num_hidden_layers=5), r"lacks 9 weights|0 of the 1 tensors"),
    "config-top-k": (config(num_experts_per_tok=9), "9 experts a token, a layer has 8"),
    "config-top-0": (config(num_experts_per_tok=0), "0 experts a token, a layer has 8"),
    "config-type": (config(num_experts_per_tok="2"), "num_experts_per_tok"),
    "config-activation": (config(hidden_act="nope"), "nope"),
    "config-length": (config(max_position_embeddings=-1), "max_position_embeddings -1"),
    "generation-text": (text("generation_config.json", '{"eos'), r"generation_config\.json' is damaged"),
    "generation-list": (text("generation_config.json", "[]"), r"generation_config\.json' is damaged"),
    "generation-end": (text("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id 'x'"),
    "tokenizer-text": (text("tokenizer.json", "{"), "cannot read the tokenizer"),
    "tokenizer-list": (text("tokenizer.json", "[]"), "cannot read the tokenizer"),
    "tokenizer-gone": (lambda folder: (folder / "tokenizer.json").unlink(), "cannot read the tokenizer"),
    "tokenizer-config": (text("tokenizer_config.json", "[]"), "cannot read the tokenizer"),
    "template": (text("chat_template.jinja", "{% for m in messages %}{{ m"), "chat template of .* is damaged: line 1"),
}


@pytest.mark.parametrize("load", [load_model, load_skeleton])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_by_name(folder: Path, kind: str, load: Callable[[ModelConfig], object]) -> None:
    damage, message = KINDS[kind]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(ModelConfig(model=str(folder)))
    assert "\n" not in str(caught.value)


def test_the_pristine_checkpoint_is_not_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for load in (load_model, load_skeleton):
        load(ModelConfig(model=str(folder)))
    assert not caplog.records


def test_weights_without_a_place_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model with fewer layers than its checkpoint computes something; families that drop layers say so."""
    config(num_hidden_layers=3)(folder)
    with caplog.at_level(logging.WARNING, "moeless"):
        load_skeleton(ModelConfig(model=str(folder)))
    assert "have no place in the model, first 'model.layers.3." in caplog.text


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE, "tokenizer.json", "tokenizer_config.json", "shard"])
def test_any_flipped_bit_is_harmless_or_refused(folder: Path, name: str) -> None:
    """Of text files and headers; nothing but a `CheckpointError` ever comes of it."""
    path = shards(folder)[1] if name == "shard" else folder / name
    pristine = path.read_bytes()
    length = 8 + int.from_bytes(pristine[:8], "little") if name == "shard" else min(len(pristine), 4_000)
    rng, messages = random.Random(name), []
    for _ in range(12):
        damaged = bytearray(pristine)
        damaged[rng.randrange(length)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            load_skeleton(ModelConfig(model=str(folder)))
        except CheckpointError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


class Settings:
    """A generation configuration."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize(("name", "value"), [("temperature", -3), ("top_p", 7.0), ("top_k", -2), ("temperature", "x")])
def test_defaults_that_no_request_may_have(name: str, value: object) -> None:
    assert sampling_defaults(Settings(temperature=0.7, top_p=None)) == {"temperature": 0.7}
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used"):
        sampling_defaults(Settings(**{name: value}))


def cli(*arguments: str) -> tuple[int, list[str]]:
    """Exit code of `moeless` and the lines on stderr that are ours."""
    command = [sys.executable, "-m", "moeless", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "TQDM_DISABLE": "1"})
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("moeless: ")]


@pytest.mark.parametrize("kind", ["exchanged-alike", "template"])
def test_the_server_does_not_start(folder: Path, kind: str) -> None:
    damage, message = KINDS[kind]
    damage(folder)
    code, lines = cli("serve", str(folder), "--port", "0")
    assert code == 1
    assert len(lines) == 1
    with pytest.raises(MoelessError, match=message):
        raise MoelessError(lines[0])


def test_the_server_does_not_start_with_tampered_predictors(folder: Path, tmp_path: Path) -> None:
    predictors = tmp_path / "predictors"
    predictors.mkdir()
    (predictors / "predictors.json").write_text(
        '{"format": "moeless.predictors/1", "tensors_sha256": "0", "layers": []}'
    )
    (predictors / "predictors.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    code, lines = cli("serve", str(folder), "--port", "0", "--predictors", str(predictors))
    assert code == 1
    assert "is not the file that predictors.json describes" in lines[0]
