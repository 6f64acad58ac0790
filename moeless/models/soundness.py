"""What can be known to be wrong with a checkpoint before it is loaded: refused by name, instead of served as garbage.

Truncated, missing and exchanged files are `shards`' to notice; here are tensors, settings and templates that are
readable but can't be what they should be. Numbers inside a tensor carry no checksum in safetensors: a flipped bit there
goes unnoticed, except in the gates of a model with predictors, which know their hash.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedConfig, PreTrainedModel

from moeless.errors import CheckpointError
from moeless.models.checkpoint_index import CheckpointIndex
from moeless.models.family import MoeLayer
from moeless.models.shards import read_json_file

_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")

log = logging.getLogger("moeless")


def check_weights(index: CheckpointIndex, model: PreTrainedModel) -> None:
    """Compare the headers of a checkpoint with a model, which may be on the meta device but has all its parameters.

    Raises:
        CheckpointError: naming the first tensor whose shape or type does not fit.
    """
    wanted = model.state_dict()
    for name, sources in index.sources.items():
        if name not in wanted:
            continue
        for keys in sources.values():
            heads = [index.slice_of(key) for key in keys]
            if name in index.converters:  # pieces of one kind are alike; what they make is the conversion's matter
                shapes = [list(head.get_shape()) for head in heads]
                expected = shapes[0] if len(set(map(tuple, shapes))) == 1 else max(shapes, key=shapes.count)
            else:
                expected = list(wanted[name].shape)
            for key, head in zip(keys, heads, strict=True):
                if list(head.get_shape()) != expected:
                    raise CheckpointError(
                        f"{str(index.files[key])!r}: {key!r} has the shape {list(head.get_shape())} where {expected} "
                        "is needed; config.json and weights are not of one model, or damaged"
                    )
                if head.get_dtype() in _INTEGERS and wanted[name].is_floating_point():
                    raise CheckpointError(f"{str(index.files[key])!r}: {key!r} has integers where weights are needed")
    _warn_of_unused(index, model, wanted)


def _warn_of_unused(index: CheckpointIndex, model: PreTrainedModel, wanted: dict[str, Any]) -> None:
    """Weights that the architecture has no place for: more layers than config.json says, perhaps."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unused = [name for name in index.sources if name not in wanted and not any(p.search(name) for p in ignored)]
    if unused:
        log.warning("%d weights of the checkpoint have no place in the model, first %r", len(unused), min(unused))


def check_layers(layers: list[MoeLayer]) -> None:
    """Raise `CheckpointError` for a router that chooses more experts than there are, or none."""
    for layer in layers:
        top_k = getattr(layer.router, "top_k", None)
        if isinstance(top_k, int) and not 1 <= top_k <= layer.num_experts:
            raise CheckpointError(f"config.json wants {top_k} experts a token, a layer has {layer.num_experts}")


def check_settings(folder: Path | None, hf_config: PreTrainedConfig) -> None:
    """Check what transformers would take as it is, or silently replace by defaults.

    Raises:
        CheckpointError: a context length below 1, ids that are no ids, or a generation_config.json that is damaged.
    """
    text = hf_config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise CheckpointError(f"config.json says max_position_embeddings {length!r}, which is no context length")
    _check_eos("config.json", getattr(text, "eos_token_id", None))
    if folder is not None and (folder / "generation_config.json").exists():
        _check_eos("generation_config.json", read_json_file(folder / "generation_config.json").get("eos_token_id"))


def _check_eos(file: str, value: Any) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{file} says eos_token_id {value!r}, which is no token id")


def check_template(tokenizer: Any, name: str) -> None:
    """Raise `CheckpointError` for a chat template that is no template; one may still refuse a conversation."""
    if getattr(tokenizer, "chat_template", None) is None:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template of {name!r} is damaged: line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # it wants another conversation, or arguments; that is a request's matter
        return
