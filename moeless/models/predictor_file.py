"""The predictor folder: `predictors.safetensors` with the tuned numbers and `predictors.json` with all that is known.

docs/predictors.md has the format and a loader in plain torch. The JSON is written last and holds the hash of the
tensors, so a folder is never half one run and half another.

Legend: H hidden, E experts, R adapter rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import align_module_device
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moeless.errors import CheckpointError
from moeless.files import replacing, write_json
from moeless.models.checkpoint import config_hash
from moeless.models.family import MoeLayer
from moeless.models.probe import ProbedLayer
from moeless.models.shards import read_header, read_json_file

FORMAT = "moeless.predictors/1"
TENSORS, DESCRIPTION = "predictors.safetensors", "predictors.json"

Verdict = Literal["kept", "tuned", "tuned-below-h", "rejected", "no-source"]
_PARTS = {"weight": "weight_EH", "adapter_down": "down_RH", "adapter_up": "up_ER"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedWeights:
    """W of logits = W x + B gelu(A x), and A (`down_RH`) and B (`up_ER`) where there is an adapter."""

    weight_EH: torch.Tensor
    down_RH: torch.Tensor | None = None
    up_ER: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those present, by their name in the file."""
        every = {part: getattr(self, name) for part, name in _PARTS.items()}
        return {part: tensor for part, tensor in every.items() if tensor is not None}

    @property
    def rank(self) -> int:
        """R, 0 without an adapter."""
        return 0 if self.down_RH is None else self.down_RH.shape[0]

    @property
    def num_parameters(self) -> int:
        """E·H + R·(H + E)."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of the tensors as they are stored."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorEntry:
    """One (source, target layer) of a predictor folder."""

    source: Literal["gate-input", "pre-attention"]
    source_layer: int
    target_layer: int
    distance: int
    """Layers from source to target; 0 for `pre-attention`."""
    verdict: Verdict
    loss: str | None
    adapter_rank: int
    before: float | None
    """Held-out accuracy of the untouched router, on the metric of the folder; None without a source."""
    after: float | None
    """Held-out accuracy of what `predict` uses."""
    metrics_before: dict[str, float]
    metrics_after: dict[str, float]
    seconds: float
    weights: TunedWeights | None = None

    @property
    def key(self) -> str:
        """Prefix of its tensors: `d1.layer3`."""
        return f"d{self.distance}.layer{self.target_layer}"

    def row(self) -> dict[str, Any]:
        """What the JSON says of it."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "weights"}


def no_source_entry(target_layer: int) -> PredictorEntry:
    """The entry of a layer that nothing known in time could predict; whoever uses the folder falls back on history."""
    return PredictorEntry(
        source="pre-attention",
        source_layer=target_layer,
        target_layer=target_layer,
        distance=0,
        verdict="no-source",
        loss=None,
        adapter_rank=0,
        before=None,
        after=None,
        metrics_before={},
        metrics_after={},
        seconds=0.0,
    )


def fingerprint(model: PreTrainedModel, points: list[ProbedLayer]) -> dict[str, str]:
    """What a predictor folder must agree on with the model it is loaded for."""
    return {
        "family": model.config.model_type,
        "config_sha256": config_hash(model.config),
        "gates_sha256": gates_hash(point.layer for point in points),
    }


def gates_hash(layers: Iterable[MoeLayer]) -> str:
    """sha256 of all routers' numbers, as bfloat16 so that the precision of loading is no matter."""
    digest = hashlib.sha256()
    for layer in layers:
        with align_module_device(layer.router):
            for tensor in layer.router.state_dict().values():
                rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
                digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def check_fingerprint(folder: Path, header: dict[str, Any], model: PreTrainedModel, points: list[ProbedLayer]) -> None:
    """Raise `CheckpointError` naming the first field in which folder and model differ."""
    wanted, found = fingerprint(model, points), header.get("fingerprint", {})
    for name, value in wanted.items():
        if found.get(name) != value:
            raise CheckpointError(
                f"the predictors in {str(folder)!r} were made for another model ({header.get('base_model')!r}): "
                f"their {name} is {found.get(name)!r}, this model's is {value!r}; run `moeless finetune` for it"
            )


def save_predictors(folder: Path, header: dict[str, Any], entries: Iterable[PredictorEntry]) -> None:
    """Write a predictor folder; `header` is what the JSON has beside format, tensors' hash and layers.

    Raises:
        CapacityError: the disk is full.
        DataError: the folder cannot be written.
    """
    entries = sorted(entries, key=lambda e: (e.distance, e.target_layer))
    tensors = {
        f"{entry.key}.{part}": tensor.contiguous()
        for entry in entries
        if entry.weights is not None
        for part, tensor in entry.weights.tensors.items()
    }
    with replacing(folder / TENSORS) as partial:
        save_file(tensors, partial, metadata={"format": FORMAT})
        digest = _file_hash(partial)
    layers = [entry.row() for entry in entries]
    write_json(folder / DESCRIPTION, {"format": FORMAT, **header, "tensors_sha256": digest, "layers": layers})


def read_predictors(folder: Path) -> tuple[dict[str, Any], list[PredictorEntry]]:
    """Header and entries of a predictor folder, whatever model it is for.

    Raises:
        CheckpointError: missing, damaged, of another format, or JSON and tensors of different runs.
    """
    if not (folder / DESCRIPTION).is_file():
        raise CheckpointError(
            f"{str(folder)!r} has no {DESCRIPTION}; give a folder that `moeless finetune --out` wrote"
        )
    header = read_json_file(folder / DESCRIPTION)
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{str(folder)!r} has format {header.get('format')!r}; this version reads {FORMAT!r}")
    read_header(folder / TENSORS)
    if _file_hash(folder / TENSORS) != header.get("tensors_sha256"):
        raise CheckpointError(f"{str(folder / TENSORS)!r} is not the file that {DESCRIPTION} describes; tune again")
    tensors = load_file(folder / TENSORS)
    try:
        entries = [PredictorEntry(**row) for row in header["layers"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{str(folder / DESCRIPTION)!r} is damaged: {error}; tune again") from error
    return header, [_with_weights(folder, entry, tensors) for entry in entries]


def _with_weights(folder: Path, entry: PredictorEntry, tensors: dict[str, torch.Tensor]) -> PredictorEntry:
    if entry.verdict not in ("tuned", "tuned-below-h"):
        return entry
    found = {name: tensors.get(f"{entry.key}.{part}") for part, name in _PARTS.items()}
    weight = found["weight_EH"]
    if weight is None or (entry.adapter_rank > 0) != (found["down_RH"] is not None and found["up_ER"] is not None):
        raise CheckpointError(f"{str(folder / TENSORS)!r} lacks the weights of {entry.key}; tune again")
    return dataclasses.replace(
        entry, weights=TunedWeights(weight_EH=weight, down_RH=found["down_RH"], up_ER=found["up_ER"])
    )


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
