"""The experts of a layer whose weights are all in one place, on a CPU: one small product after the other.

A decode step gives an expert a row or a few, so its time is that of reading weights, and what is spent around the
products counts: rows are sorted and gathered in numpy.

Legend: T tokens, K experts a token, H hidden, E experts, R = TK rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from moeless.models.expert_ffn import ExpertFfn, is_usual
from moeless.models.family import MoeLayer
from moeless.models.small_products import is_plain, multiply_by_expert, store_by_input


class WholeExperts:
    """Stands in for the forward of an experts module on a CPU; see `install_whole_experts`."""

    def __init__(self, experts: Any) -> None:
        """Raises `UnsupportedModelError` for an experts module of an unknown kind."""
        self._ffn, self._num_experts = ExpertFfn(experts), experts.num_experts
        self._weights = {name: weight.detach() for name, weight in experts.named_parameters()}

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts [T, H]; arguments as transformers names them."""
        owner_R = top_k_index.numpy().ravel()
        order_R = owner_R.argsort(kind="stable")
        counts_E = np.bincount(owner_R, minlength=self._num_experts)
        rows_RH = torch.from_numpy(hidden_states.numpy()[order_R // top_k_index.shape[1]])
        y_RH = self._ffn.grouped(rows_RH, self._weights, counts_E.tolist(), multiply_by_expert).numpy()
        y_TKH = np.empty((*top_k_index.shape, y_RH.shape[1]), y_RH.dtype)
        y_TKH.reshape(y_RH.shape)[order_R] = y_RH
        return (torch.from_numpy(y_TKH) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def install_whole_experts(layers: Sequence[MoeLayer]) -> None:
    """Have the experts of a model that runs whole computed this way, where they are on a CPU and of the usual kinds.

    Weights keep their shapes and values but are stored input by output.
    """
    for layer in layers:
        experts: Any = layer.experts
        if not layer.experts_receive_ids or not is_usual(experts) or not is_plain(experts):
            continue
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            weight = getattr(experts, name, None)
            if isinstance(weight, nn.Parameter) and not experts.is_transposed:
                store_by_input(weight)
        experts.forward = WholeExperts(experts)
