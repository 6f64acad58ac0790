"""The experts of a layer whose weights are all in one place: transformers' grouped computation with less around it.

A decode step of a small model spends as long on sorting and gathering a few rows as on multiplying them. On a CPU that
bookkeeping is numpy's here; products and sums are the same, in the same order, so results are bit by bit the same.

Legend: T tokens, K experts a token, H hidden, E experts, R = TK rows, F expert ffn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from moeless.models.family import MoeLayer

_ALIGNMENT_BYTES = 16
"""What a row of a grouped product has to be a multiple of."""


class WholeExperts:
    """Stands in for the forward of an experts module on a CPU; see `install_whole_experts`."""

    def __init__(self, experts: Any) -> None:
        self._module, self._num_experts = experts, experts.num_experts
        self._weights = dict(experts.named_parameters())
        self._matrices = {
            name: weight if experts.is_transposed else weight.transpose(1, 2)
            for name, weight in self._weights.items()
            if weight.ndim == 3
        }

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts [T, H]; arguments as transformers names them."""
        top_k = top_k_index.shape[1]
        owner_R = top_k_index.reshape(-1).numpy()
        order_R = np.argsort(owner_R, kind="stable")
        ends_E = torch.from_numpy(np.bincount(owner_R, minlength=self._num_experts).cumsum().astype(np.int32))
        owner_sorted_R = torch.from_numpy(owner_R[order_R])
        rows_RH = hidden_states.index_select(0, torch.from_numpy(order_R // top_k))
        module = self._module
        if module.has_gate:
            inner_RF = module._apply_gate(self._linear(rows_RH, "gate_up_proj", ends_E, owner_sorted_R))
        else:
            inner_RF = module.act_fn(self._linear(rows_RH, "up_proj", ends_E, owner_sorted_R))
        y_RH = self._linear(inner_RF, "down_proj", ends_E, owner_sorted_R)
        y_TKH = torch.empty_like(y_RH).index_copy_(0, torch.from_numpy(order_R), y_RH).view(-1, top_k, y_RH.shape[1])
        return (y_TKH * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _linear(self, x: torch.Tensor, name: str, ends_E: torch.Tensor, owner_R: torch.Tensor) -> torch.Tensor:
        y = F.grouped_mm(x, self._matrices[name], offs=ends_E)
        bias = self._weights.get(f"{name}_bias")
        return y if bias is None else y + bias[owner_R]


def install_whole_experts(layers: Sequence[MoeLayer]) -> None:
    """Have the experts of a model that runs whole computed this way, where they are on a CPU and of the usual kinds."""
    for layer in layers:
        experts: Any = layer.experts
        usual = hasattr(experts, "is_transposed") and not getattr(experts, "has_post_expert_norm", False)
        if layer.experts_receive_ids and usual and all(map(_suits, experts.parameters())):
            experts.forward = WholeExperts(experts)


def _suits(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and all(n * weight.itemsize % _ALIGNMENT_BYTES == 0 for n in weight.shape[1:])
