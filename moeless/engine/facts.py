"""What a front end needs to know of a model before it can take requests for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeless.config.engine import EngineConfig
from moeless.engine.request import sampling_defaults
from moeless.engine.runner import context_length
from moeless.errors import CapacityError, UsageError
from moeless.models.checkpoint import LoadedModel
from moeless.models.family import experts_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Plain numbers, the same on every rank."""

    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling_defaults: dict[str, float]
    """Fields of `SamplingParams` that the checkpoint's generation configuration sets."""
    num_moe_layers: int
    num_experts: int
    """Of the layer that has most."""
    top_k: int | None
    """Experts a token; None: the checkpoint does not say, or not for all layers the same."""


def model_facts(config: EngineConfig, loaded: LoadedModel, max_extent: int) -> ModelFacts:
    """The facts of a model whose cache holds sequences of up to `max_extent` tokens.

    Raises:
        CapacityError, UsageError: a context length that is asked for and cannot be had.
        CheckpointError: a generation configuration that cannot be used.
    """
    return ModelFacts(
        max_model_len=_max_model_len(config, loaded, max_extent),
        vocab_size=loaded.model.get_input_embeddings().num_embeddings,  # type: ignore[arg-type]
        eos_ids=_eos_ids(loaded.model),
        sampling_defaults=sampling_defaults(loaded.model.generation_config),
        num_moe_layers=len(loaded.layers),
        num_experts=max(layer.num_experts for layer in loaded.layers),
        top_k=experts_per_token(loaded.model, loaded.layers),
    )


def _max_model_len(config: EngineConfig, loaded: LoadedModel, max_extent: int) -> int:
    limit = context_length(loaded.model)
    wanted = config.max_model_len
    if wanted is not None and wanted > limit:
        raise UsageError(f"--max-model-len {wanted} is over the model's context length {limit}")
    if wanted is not None and wanted > max_extent:
        raise CapacityError(
            f"--max-model-len {wanted} does not fit: with --kv-tokens {config.kv_tokens} a sequence can have "
            f"{max_extent} tokens"
        )
    return min(limit, max_extent) if wanted is None else wanted


def _eos_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end a text, as the checkpoint's generation configuration has them."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.get_text_config().eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)
