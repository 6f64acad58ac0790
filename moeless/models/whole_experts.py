"""The experts of a layer whose weights are all in one place, on a CPU: one small product after the other.

A decode step gives an expert a row or a few, so its time is that of reading weights, and what is spent around the
products counts. Rows are sorted and gathered in numpy, whose BLAS also multiplies few rows nearly twice as fast as
torch's: it has kernels for small matrices, if weights are stored input by output.

Legend: T tokens, K experts a token, H hidden, E experts, O outputs, R = TK rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import nn

from moeless.models.expert_ffn import ExpertFfn, is_usual
from moeless.models.family import MoeLayer

_SMALL_PRODUCT = 1 << 20
"""Multiplications up to which numpy's product on one thread is as fast as torch's on all."""


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
        top_k = top_k_index.shape[1]
        owner_R = top_k_index.reshape(-1).numpy()
        order_R = np.argsort(owner_R, kind="stable")
        counts_E = np.bincount(owner_R, minlength=self._num_experts)
        rows_RH = torch.from_numpy(hidden_states.numpy()[order_R // top_k])
        y_RH = self._ffn.grouped(rows_RH, self._weights, counts_E.tolist(), multiply_by_expert).numpy()
        y_TKH = np.empty((*top_k_index.shape, y_RH.shape[1]), y_RH.dtype)
        y_TKH.reshape(y_RH.shape)[order_R] = y_RH
        return (torch.from_numpy(y_TKH) * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def multiply_by_expert(x_RH: torch.Tensor, weight_EHO: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Each expert's rows times its weights [R, O]; rows come in order of expert."""
    y_RO = x_RH.new_empty(x_RH.shape[0], weight_EHO.shape[2])
    x, weight, y = x_RH.numpy(), weight_EHO.numpy(), y_RO.numpy()
    most_rows = _SMALL_PRODUCT // weight[0].size
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = slice(start, start := start + count)
        if count <= most_rows:
            np.matmul(x[rows], weight[expert], out=y[rows])
        else:
            torch.mm(x_RH[rows], weight_EHO[expert], out=y_RO[rows])
    return y_RO


def install_whole_experts(layers: Sequence[MoeLayer]) -> None:
    """Have the experts of a model that runs whole computed this way, where they are on a CPU and of the usual kinds.

    Weights keep their shapes and values but are stored input by output, and numpy's BLAS is held to one thread: torch
    has threads of its own on the same cores.
    """
    suited: list[Any] = [layer.experts for layer in layers if layer.experts_receive_ids and _suits(layer.experts)]
    for experts in suited:
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            weight = getattr(experts, name, None)
            if isinstance(weight, nn.Parameter) and not experts.is_transposed:
                weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        experts.forward = WholeExperts(experts)
    if suited:
        ThreadpoolController().limit(limits=1, user_api="blas")


def _suits(experts: nn.Module) -> bool:
    return is_usual(experts) and all(w.device.type == "cpu" and w.dtype == torch.float32 for w in experts.parameters())
