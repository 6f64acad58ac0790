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
from moeless.models.small_products import is_small, multiply_by_expert, to_panels

_PRODUCTS = ("gate_up_proj", "up_proj", "down_proj")


class WholeExperts:
    """Stands in for the forward of an experts module on a CPU; see `install_whole_experts`."""

    def __init__(self, experts: Any) -> None:
        """Store the experts' weights in panels."""
        self._ffn, self._num_experts = ExpertFfn(experts), experts.num_experts
        for name in _PRODUCTS:
            weight = getattr(experts, name, None)
            if isinstance(weight, nn.Parameter):
                weight.data = to_panels(weight.data.transpose(1, 2) if experts.is_transposed else weight.data)
        self._weights = {name: weight.detach() for name, weight in experts.named_parameters()}

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts [T, H]; arguments as transformers names them."""
        owner_R = top_k_index.numpy().ravel()
        order_R = owner_R.argsort(kind="stable")
        counts = np.bincount(owner_R, minlength=self._num_experts).tolist()

        def multiply(rows: torch.Tensor, name: str) -> torch.Tensor:
            return multiply_by_expert(rows, self._weights[name], counts)

        rows_RH = torch.from_numpy(hidden_states.numpy().take(order_R // top_k_index.shape[1], 0))
        y_RH = self._ffn.grouped(rows_RH, self._weights, counts, multiply).numpy()
        y_TKH = np.empty((*top_k_index.shape, y_RH.shape[1]), y_RH.dtype)
        y_TKH.reshape(y_RH.shape)[order_R] = y_RH
        return torch.from_numpy(np.matmul(top_k_weights.numpy()[:, None], y_TKH)[:, 0])


def install_whole_experts(layers: Sequence[MoeLayer]) -> None:
    """Have the small experts of a model that runs whole on a CPU computed this way, where they are of the usual kinds.

    Their weights are stored anew, so that nothing else can use them afterwards.
    """
    for layer in layers:
        experts: Any = layer.experts
        if layer.experts_receive_ids and is_usual(experts) and is_small(experts):
            experts.forward = WholeExperts(experts)
