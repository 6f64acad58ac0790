"""The experts of a layer whose weights are all in one place: transformers' grouped computation with less around it.

A decode step of a small model spends as long on sorting and gathering a few rows as on multiplying them. On a CPU that
bookkeeping is numpy's here; products and sums are the same, in the same order, so results are bit by bit the same.

Legend: T tokens, K experts a token, H hidden, E experts, R = TK rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moeless.models.expert_ffn import ExpertFfn, is_usual
from moeless.models.family import MoeLayer

_ALIGNMENT_BYTES = 16
"""What a row of a grouped product has to be a multiple of."""


class WholeExperts:
    """Stands in for the forward of an experts module on a CPU; see `install_whole_experts`."""

    def __init__(self, experts: Any) -> None:
        """Raises `UnsupportedModelError` for an experts module of an unknown kind."""
        self._ffn, self._num_experts = ExpertFfn(experts), experts.num_experts
        self._weights = dict(experts.named_parameters())

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts [T, H]; arguments as transformers names them."""
        top_k = top_k_index.shape[1]
        owner_R = top_k_index.reshape(-1).numpy()
        order_R = np.argsort(owner_R, kind="stable")
        counts_E = np.bincount(owner_R, minlength=self._num_experts)
        rows_RH = hidden_states.index_select(0, torch.from_numpy(order_R // top_k))
        y_RH = self._ffn.grouped(rows_RH, self._weights, counts_E.tolist())
        y_TKH = torch.empty_like(y_RH).index_copy_(0, torch.from_numpy(order_R), y_RH).view(-1, top_k, y_RH.shape[1])
        return (y_TKH * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def install_whole_experts(layers: Sequence[MoeLayer]) -> None:
    """Have the experts of a model that runs whole computed this way, where they are on a CPU and of the usual kinds."""
    for layer in layers:
        experts: Any = layer.experts
        if layer.experts_receive_ids and is_usual(experts) and all(map(_suits, experts.parameters())):
            experts.forward = WholeExperts(experts)


def _suits(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and all(n * weight.itemsize % _ALIGNMENT_BYTES == 0 for n in weight.shape[1:])
