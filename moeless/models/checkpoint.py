"""Loading a Hugging Face MoE checkpoint whole: found, checked, refused with a reason, or loaded.

Everything that can be known without reading weights (folder, shards, family, quantisation) is checked first.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from moeless.config.model import ModelConfig
from moeless.errors import CheckpointError, UnsupportedModelError, UsageError
from moeless.models.checkpoint_index import CheckpointIndex
from moeless.models.family import MoeLayer, find_moe_layers
from moeless.models.shards import read_json_file
from moeless.models.soundness import check_layers, check_settings, check_template, check_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in eval mode with its MoE layers, and its tokenizer if the checkpoint has one."""

    model: PreTrainedModel
    layers: list[MoeLayer]
    tokenizer: Any | None
    name: str

    @property
    def input_device(self) -> torch.device:
        """Where token ids go."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]


def load_model(config: ModelConfig) -> LoadedModel:
    """Load `config.model` for inference.

    Raises:
        CheckpointError: missing, damaged or incomplete checkpoint.
        UnsupportedModelError: dense, quantised, or a family that cannot work.
    """
    source = resolve_source(config.model)
    hf_config = load_config(config)
    skeleton = check_family(hf_config, config.trust_remote_code)
    if isinstance(source, Path):
        check_weights(CheckpointIndex(source, skeleton), skeleton)
    dtype, placement = _dtype(config, hf_config), _placement(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=hf_config,
            dtype=dtype,
            output_loading_info=True,
            **placement,
            **_hub_options(config),
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        fits = "ignore_mismatched_sizes" not in str(error)
        reason = _one_line(error) if fits else "its weights have other sizes than config.json says"
        raise CheckpointError(f"cannot load {config.model!r}: {reason}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{config.model!r} lacks {len(missing)} weights of its architecture, first {missing[0]!r}"
        )
    model.eval().requires_grad_(False)
    return LoadedModel(model=model, layers=find_moe_layers(model), tokenizer=load_tokenizer(config), name=config.model)


def resolve_source(name: str) -> Path | str:
    """A local folder, or a hub id; what looks like a path is never sent to a hub.

    Raises:
        CheckpointError: a path that is not there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{name!r} is a file; give the checkpoint's folder")
    parts = Path(name).parts
    looks_local = name.startswith((".", "~", "/")) or len(parts) != 2 or Path(parts[0]).exists()
    if looks_local:
        raise CheckpointError(
            f"model folder {name!r} does not exist; give a checkpoint folder or a hub id (owner/name)"
        )
    return name


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """The checkpoint's configuration. Raises `CheckpointError` or `UnsupportedModelError` when it can't be used."""
    source = resolve_source(config.model)
    if isinstance(source, Path):
        if config.revision is not None:
            raise UsageError(f"--revision {config.revision} has no effect on the local folder {config.model!r}")
        if not (source / "config.json").exists():
            raise CheckpointError(f"{config.model!r} has no config.json; it is not a Hugging Face checkpoint")
        raw = read_json_file(source / "config.json")
        if raw.get("auto_map") and not config.trust_remote_code:
            raise UnsupportedModelError(
                f"{config.model!r} brings its own code (auto_map in config.json); give --trust-remote-code to run it"
            )
    try:
        hf_config = AutoConfig.from_pretrained(source, **_hub_options(config))
    except Exception as error:  # each family checks its values in its own way
        raise CheckpointError(f"cannot read the configuration of {config.model!r}: {_one_line(error)}") from error
    check_settings(source if isinstance(source, Path) else None, hf_config)
    return hf_config


def check_family(hf_config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Refuse what cannot work, before any weight is read.

    Returns:
        The model on the meta device.

    Raises:
        UnsupportedModelError: quantised, dense, not a causal language model, or a refused family.
        CheckpointError: values from which no model can be built.
    """
    quantised = getattr(hf_config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else type(quantised).__name__
        raise UnsupportedModelError(
            f"quantised checkpoints are not supported ({method}); dequantise it to bfloat16 and save it first"
        )
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{hf_config.model_type!r} is not a causal language model transformers knows: {_first_line(error)}"
        ) from error
    except Exception as error:  # whatever a family's constructor trips over
        raise CheckpointError(f"config.json does not make a {hf_config.model_type!r} model: {error!r}") from error
    check_layers(find_moe_layers(skeleton))
    return skeleton


def load_tokenizer(config: ModelConfig) -> Any | None:
    """The tokenizer given or the checkpoint's, None when there is none. Raises `CheckpointError` when it is damaged."""
    source = resolve_source(config.tokenizer or config.model)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if isinstance(source, Path) and not any((source / name).exists() for name in names):
        if config.tokenizer is not None:
            raise CheckpointError(f"--tokenizer {config.tokenizer!r} has no tokenizer files")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=isinstance(source, Path), trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise CheckpointError(f"cannot read the tokenizer of {str(source)!r}: {_first_line(error)}") from error
    check_template(tokenizer, str(source))
    return tokenizer


def config_hash(hf_config: PreTrainedConfig) -> str:
    """sha256 of what decides the architecture: the configuration without versions, names and precision."""
    values = hf_config.to_dict()
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache"):
        values.pop(key, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _dtype(config: ModelConfig, hf_config: PreTrainedConfig) -> torch.dtype | str:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    on_cpu = pick_device(config.device).type == "cpu" if config.device_map == "none" else not torch.cuda.is_available()
    return torch.float32 if on_cpu else "auto"


def pick_device(name: str) -> torch.device:
    """`auto` is the accelerator if there is one, else the CPU. Raises `CheckpointError` for an unknown device."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(f"device {name!r} cannot be used here: {_first_line(error)}") from error
    return device


def _placement(config: ModelConfig) -> dict[str, Any]:
    if config.device_map == "auto":
        options: dict[str, Any] = {"device_map": "auto"}
        if config.cpu_memory_gb is not None:
            num_accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
            limits: dict[int | str, int] = {i: torch.cuda.mem_get_info(i)[0] for i in range(num_accelerators)}
            limits["cpu"] = int(config.cpu_memory_gb * 1e9)
            options["max_memory"] = limits
        if config.offload_dir is not None:
            options["offload_folder"] = config.offload_dir
        return options
    device = pick_device(config.device)
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _hub_options(config: ModelConfig) -> dict[str, Any]:
    local = isinstance(resolve_source(config.model), Path)
    return {
        "local_files_only": local,
        "trust_remote_code": config.trust_remote_code,
        **({"revision": config.revision} if config.revision else {}),
    }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
