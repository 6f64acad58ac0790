"""Loading a checkpoint without its experts: the skeleton that every rank holds, and the store of the experts.

Expert parameters are never allocated: the model is built on the meta device, their parameters are taken out, and every
other weight is loaded as `from_pretrained` would load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from moeless.config.model import ModelConfig
from moeless.errors import CheckpointError, UsageError
from moeless.models.checkpoint import (
    LoadedModel,
    check_family,
    load_config,
    load_tokenizer,
    pick_device,
    resolve_source,
)
from moeless.models.checkpoint_index import CheckpointIndex
from moeless.models.expert_store import ExpertStore
from moeless.models.family import MoeLayer, find_moe_layers
from moeless.models.soundness import check_weights


def load_skeleton(config: ModelConfig) -> tuple[LoadedModel, ExpertStore]:
    """Everything but the experts of `config.model`, and the store that its experts are read from.

    The model can't run until something takes the place of its experts (`moeless.engine.moe_block`).

    Raises:
        CheckpointError: missing, damaged or incomplete checkpoint.
        UnsupportedModelError: dense, quantised, or a family that cannot work.
        UsageError: `--device-map auto`, which is for whole models.
    """
    if config.device_map != "none":
        raise UsageError("--device-map auto has no effect with expert parallelism, which places experts itself")
    hf_config = load_config(config)
    folder = _local_folder(config)
    check_family(hf_config, config.trust_remote_code)
    device = pick_device(config.device)
    dtype = _dtype(config, device, hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
    layers = find_moe_layers(model)
    index = CheckpointIndex(folder, model)
    check_weights(index, model)
    store = ExpertStore(index, model, layers, dtype)
    _load_rest(model, index, _take_out_experts(layers), dtype, config.model)
    model.generation_config = _generation_config(folder, model)
    model.eval().requires_grad_(False).to(device)
    loaded = LoadedModel(model=model, layers=layers, tokenizer=load_tokenizer(config), name=config.model)
    return loaded, store


def _generation_config(folder: Path, model: PreTrainedModel) -> Any:
    """Sampling defaults and where a text ends, as `from_pretrained` finds them."""
    if not (folder / "generation_config.json").exists():
        return model.generation_config
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"generation_config.json cannot be used: {' '.join(str(error).split())[:300]}") from error


def _take_out_experts(layers: list[MoeLayer]) -> set[str]:
    """Remove the parameters of the experts; their full names."""
    removed = set()
    for layer in layers:
        for module in layer.experts.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]  # nothing left to initialise
        for name in [n for n, _ in layer.experts.named_parameters()]:
            removed.add(f"{layer.experts_name}.{name}")
            owner, _, leaf = name.rpartition(".")
            del layer.experts.get_submodule(owner)._parameters[leaf]
    return removed


def _load_rest(
    model: PreTrainedModel, index: CheckpointIndex, removed: set[str], dtype: torch.dtype, name: str
) -> None:
    """Load every parameter that is not in `removed`, as `from_pretrained` does it."""
    kept = {
        key: index.slice_of(key)
        for parameter, sources in index.sources.items()
        if parameter not in removed
        for keys in sources.values()
        for key in keys
    }
    load_config = LoadStateDictConfig(
        weight_mapping=index.mapping, dtype=dtype, dtype_plan=model._get_dtype_plan(dtype)
    )
    try:
        info, _ = convert_and_load_state_dict_in_model(model, kept, load_config)
        info = model._finalize_model_loading(model, load_config, info)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {name!r}: {' '.join(str(error).split())[:300]}") from error
    if info.missing_keys:
        missing = sorted(info.missing_keys)
        raise CheckpointError(f"{name!r} lacks {len(missing)} weights of its architecture, first {missing[0]!r}")


def _local_folder(config: ModelConfig) -> Path:
    source = resolve_source(config.model)
    if isinstance(source, Path):
        return source
    try:
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
        return Path(snapshot_download(source, revision=config.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"cannot download {config.model!r}: {str(error).splitlines()[0]}") from error


def _dtype(config: ModelConfig, device: torch.device, hf_config: Any) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    own = getattr(hf_config, "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32
