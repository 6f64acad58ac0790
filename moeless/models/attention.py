"""Attention over packed batches: many sequences side by side in one row, each with keys and values of its own.

The function is registered under `ATTENTION_NAME` with transformers' `AttentionInterface`, so every family's own
attention module calls it; no mask is built by the model and no padding token ever reaches a router. A step's batch is
a `PackedBatch` of `AttentionGroup`s: sequences of a group have the same number of new tokens and attend in one batched
call (all decoding sequences), a prefill chunk is a group of one. Keys and values come from a `KeyValueStore`, which
the engine implements (`engine/kv_cache.py`). `reference_attention` computes the same, sequence by sequence.

Families differ in: sliding windows, chunked attention (Llama-4), attention sinks (gpt-oss), soft-capping, head sizes of
values, and latent keys and values (MLA) that are cached compressed and expanded after the cache.

Legend: Q packed new tokens, B sequences of a group, N new tokens a sequence, S keys a sequence (padded), A attention
heads, C key-value heads, D head size of keys, V head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from moeless.models.attend import attend_many, attend_one

ATTENTION_NAME = "moeless_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Sequences of a packed batch that attend in one call."""

    first_row: int
    """Where the group's rows start in the packed batch; sequence b has rows first_row + b·N up to + N."""
    num_seqs: int
    num_new: int
    """New tokens of each sequence (N)."""
    num_keys: tuple[int, ...]
    """Keys of each sequence, its new tokens included."""
    key_rows: slice | torch.Tensor
    """Where the store keeps them: one slice of B·stride rows, or row numbers [B·S]."""
    stride: int
    """Rows from one sequence to the next under a slice."""

    @property
    def max_keys(self) -> int:
        """Keys a sequence after padding (S)."""
        return max(self.num_keys)

    @property
    def is_fresh(self) -> bool:
        """Whether there is nothing before the new tokens."""
        return all(keys == self.num_new for keys in self.num_keys)

    @property
    def rows(self) -> slice:
        """The group's rows of the packed batch."""
        return slice(self.first_row, self.first_row + self.num_seqs * self.num_new)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """How the rows of one step belong to sequences, and where their new keys and values go."""

    groups: tuple[AttentionGroup, ...]
    """In the order of their rows, which they cover without gaps."""
    positions_Q: torch.Tensor
    store_rows_Q: torch.Tensor
    """Row of the key-value store that each new token is written to."""
    masks: dict[tuple[int, int | None, int | None], torch.Tensor | None] = field(default_factory=dict)
    """Masks made so far in this step, by (group, window, chunk): layers of one kind share them."""


class KeyValueStore(Protocol):
    """What attention needs of the engine's cache."""

    @property
    def batch(self) -> PackedBatch:
        """The step that is running."""
        ...

    def read(self, layer: int, group: AttentionGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, C, S, D] and values [B, C, S, V] of a group; what lies behind a sequence's keys is finite."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What an attention module knows of itself beyond what it passes on; `moeless_attention` on the module."""

    store: KeyValueStore
    layer: int
    has_window: bool
    """Some families hand every layer the sliding window and tell by layer type which ones have it."""
    chunk: int | None
    """Llama-4: a token sees its own chunk of this size only."""
    sinks_A: torch.Tensor | None
    is_latent: bool

    @staticmethod
    def of(module: Any, store: KeyValueStore) -> AttentionLayer:
        """Read off a transformers attention module."""
        layer_types: Sequence[str] | None = getattr(module.config, "layer_types", None)
        kind = layer_types[module.layer_idx] if layer_types else None
        return AttentionLayer(
            store=store,
            layer=module.layer_idx,
            has_window=kind is None or "sliding" in kind,
            chunk=getattr(module.config, "attention_chunk_size", None) if kind == "chunked_attention" else None,
            sinks_A=getattr(module, "sinks", None),
            is_latent=caches_latents(module),
        )


def install_attention(model: PreTrainedModel, store: KeyValueStore) -> None:
    """Make every attention layer of `model` work on the packed batches of `store`."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config"):
            module.moeless_attention = AttentionLayer.of(module, store)  # type: ignore[assignment]
    model.set_attn_implementation(ATTENTION_NAME)


def caches_latents(module: nn.Module) -> bool:
    """Whether the layer caches compressed keys and values (MLA) and expands what the cache gives back."""
    return hasattr(module, "kv_b_proj")


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls.

    Args:
        module: the family's attention module, after `install_attention`.
        query: [1, A, Q, D].
        key, value: the new tokens' [1, C, Q, ·], which the store already has; under MLA the expanded keys and values
            [1, A, sum of B·S, ·] of all groups one after the other.

    Returns:
        [1, Q, A, V], and None for the attention weights.
    """
    layer: AttentionLayer = module.moeless_attention  # type: ignore[assignment]
    batch = layer.store.batch
    window = sliding_window if layer.has_window else None
    sinks_A = layer.sinks_A if s_aux is None else s_aux
    query_QAD = query[0].transpose(0, 1)
    outputs, first_key = [], 0
    for number, group in enumerate(batch.groups):
        if layer.is_latent:
            keys = slice(first_key, first_key := first_key + group.num_seqs * group.max_keys)
            shape = (group.num_seqs, group.max_keys)
            key_BCSD, value_BCSV = (side[0, :, keys].unflatten(1, shape).transpose(0, 1) for side in (key, value))
        else:
            key_BCSD, value_BCSV = layer.store.read(layer.layer, group)
        where = (number, window, layer.chunk)
        if where not in batch.masks:
            batch.masks[where] = _additive_mask(group, window, layer.chunk, query)
        rest = (key_BCSD, value_BCSV, batch.masks[where], scaling, sinks_A, softcap)
        if group.num_new == 1:
            outputs.append(attend_one(query_QAD[group.rows], *rest))
        else:
            is_causal = group.is_fresh and min(window or group.num_new, layer.chunk or group.num_new) >= group.num_new
            outputs.append(attend_many(query_QAD[group.rows], *rest, is_causal=is_causal))
    output_QAV = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_QAV.unsqueeze(0), None


def _additive_mask(
    group: AttentionGroup, window: int | None, chunk: int | None, like: torch.Tensor
) -> torch.Tensor | None:
    """0 where a new token sees a key and -inf elsewhere, [B, 1, N, S]; None when every token sees every key."""
    num_keys_B = torch.tensor(group.num_keys, device=like.device)
    key_S = torch.arange(group.max_keys, device=like.device)
    position_BN = (num_keys_B - group.num_new)[:, None] + torch.arange(group.num_new, device=like.device)
    seen_BNS = key_S <= position_BN[..., None]
    if window:
        seen_BNS &= key_S > position_BN[..., None] - window
    if chunk:
        seen_BNS &= key_S // chunk == position_BN[..., None] // chunk
    if seen_BNS.all():
        return None
    mask_BNS = torch.zeros(seen_BNS.shape, dtype=like.dtype, device=like.device)
    return mask_BNS.masked_fill_(~seen_BNS, float("-inf"))[:, None]


def reference_attention(
    query_NAD: torch.Tensor,
    key_SCD: torch.Tensor,
    value_SCV: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks_A: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[N, A, V] of one sequence whose last N tokens are new, token by token and head by head."""
    num_new, num_heads, _ = query_NAD.shape
    num_keys, num_kv_heads, _ = key_SCD.shape
    output_NAV = query_NAD.new_zeros(num_new, num_heads, value_SCV.shape[-1])
    for n in range(num_new):
        position = num_keys - num_new + n
        first = 0 if window is None else max(0, position - window + 1)
        first = first if chunk is None else max(first, position - position % chunk)
        seen = list(range(first, position + 1))
        for head in range(num_heads):
            shared = head * num_kv_heads // num_heads
            scores = key_SCD[seen, shared] @ query_NAD[n, head] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks_A is not None:
                scores = torch.cat([scores, sinks_A[head : head + 1]])
            weights = scores.softmax(0)[: len(seen)]
            output_NAV[n, head] = weights @ value_SCV[seen, shared]
    return output_NAV
