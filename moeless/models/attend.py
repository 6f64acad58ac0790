"""What attention computes for a group of sequences with equally many new tokens.

Legend: Q packed new tokens, B sequences of a group, N new tokens a sequence, S keys a sequence (padded), A attention
heads, C key-value heads, D head size of keys, V head size of values.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

_SMALL_PRODUCT = 1 << 18
"""Multiplications of queries and keys up to which numpy on one thread is faster than torch on several."""


def attend_one(
    query_BAD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_B1NS: torch.Tensor | None,
    scaling: float | None,
    sinks_A: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """[B, A, V] for one new token a sequence, from keys [B, C, S, D] and values [B, C, S, V].

    Heads that share a key-value head stand where query tokens stand.
    """
    num_seqs, num_heads, size = query_BAD.shape
    query = query_BAD.reshape(num_seqs, key.shape[1], -1, size)
    if sinks_A is None and softcap is None and _is_small(query, key):
        output = _in_numpy(query, key, value, mask_B1NS, scaling)
    elif sinks_A is None and softcap is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_B1NS, scale=scaling)
    else:
        sinks = None if sinks_A is None else sinks_A.view(1, key.shape[1], -1, 1).expand(*query.shape[:3], 1)
        output = _eager(query, key, value, mask_B1NS, scaling, sinks, softcap)
    return output.reshape(num_seqs, num_heads, -1)


def attend_many(
    query_QAD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_B1NS: torch.Tensor | None,
    scaling: float | None,
    sinks_A: torch.Tensor | None,
    softcap: float | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """[B·N, A, V] for N new tokens a sequence, from keys [B, C, S, D] and values [B, C, S, V].

    `is_causal` says that the mask is the plain triangle, half of which the fused kernel then need not compute.
    """
    num_rows, num_heads, _ = query_QAD.shape
    query = query_QAD.unflatten(0, (len(key), -1)).transpose(1, 2)
    if sinks_A is None and softcap is None:
        mask = None if is_causal else mask_B1NS
        output = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=num_heads != key.shape[1]
        )
    else:
        share = num_heads // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        sinks = None if sinks_A is None else sinks_A.view(1, -1, 1, 1).expand(*query.shape[:3], 1)
        output = _eager(query, key, value, mask_B1NS, scaling, sinks, softcap)
    return output.transpose(1, 2).reshape(num_rows, num_heads, -1)


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention spelled out, for what the fused kernels lack; a sink is one more key whose value is zero."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return scores.softmax(-1, dtype=torch.float32)[..., :-1].to(query.dtype) @ value


def _is_small(query: torch.Tensor, key: torch.Tensor) -> bool:
    on_cpu = query.device.type == "cpu" and query.dtype == torch.float32 and not query.requires_grad
    return on_cpu and query.numel() * key.shape[2] <= _SMALL_PRODUCT


def _in_numpy(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attention of a few new tokens on a CPU: numpy's BLAS has kernels for small matrices, torch's has none."""
    scores = np.matmul(query.numpy(), key.numpy().swapaxes(2, 3))
    scores *= query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is not None:
        scores += mask.numpy()
    return torch.from_numpy(np.matmul(torch.from_numpy(scores).softmax(-1).numpy(), value.numpy()))
