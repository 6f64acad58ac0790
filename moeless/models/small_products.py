"""Products of few rows with small weights on a CPU: a call's overhead and the reading of weights are all there is.

numpy's BLAS has kernels for small matrices that torch's has not: with weights stored input by output it multiplies 1 to
16 rows in about two thirds of the time. It is held to one thread here, as torch has threads of its own on these cores.

Legend: R rows, H inputs, O outputs, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import nn
from torch.nn import functional as F

LARGEST = 1 << 20
"""Multiplications up to which numpy's product on one thread is as fast as torch's on several."""
_FEW_ROWS = 8
"""A layer whose weights are too large for this many rows is left to torch."""


class SmallLinear:
    """Stands in for the forward of an `nn.Linear`; see `install_small_linears`."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight_OH, self._bias_O = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        self._weight_HO = self._weight_OH.numpy().T
        self._most_inputs = LARGEST // linear.out_features

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # torch's name for it
        """`input` [..., H] times the weights [..., O]."""
        if input.numel() > self._most_inputs:
            return F.linear(input, self._weight_OH, self._bias_O)
        y = torch.from_numpy(np.matmul(input.numpy(), self._weight_HO))
        return y if self._bias_O is None else y + self._bias_O


def install_small_linears(model: nn.Module, but: nn.Module | None = None) -> None:
    """Have the small linear layers of `model` computed this way, where they are on a CPU in single precision.

    `but` names a module, such as the embeddings, whose weights other modules use too and that stay as they are.
    """
    shared = set() if but is None else {id(weight) for weight in but.parameters()}
    for module in model.modules():
        if type(module) is not nn.Linear or id(module.weight) in shared or not is_plain(module):
            continue
        if module.weight.numel() * _FEW_ROWS <= LARGEST:
            store_by_input(module.weight)
            module.forward = SmallLinear(module)  # type: ignore[method-assign]


def is_plain(module: nn.Module) -> bool:
    """Whether all parameters are on a CPU in single precision, which numpy can multiply."""
    return all(w.device.type == "cpu" and w.dtype == torch.float32 for w in module.parameters())


def store_by_input(weight: torch.Tensor) -> None:
    """Store weights [..., O, H] input by output; their shape and values stay."""
    weight.data = weight.data.transpose(-2, -1).contiguous().transpose(-2, -1)


def multiply_by_expert(x_RH: torch.Tensor, weight_EHO: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Each expert's rows times its weights [R, O]; rows come in order of expert."""
    y_RO = x_RH.new_empty(x_RH.shape[0], weight_EHO.shape[2])
    x, weight, y = x_RH.numpy(), weight_EHO.numpy(), y_RO.numpy()
    most_rows = LARGEST // weight[0].size
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


def hold_blas_to_one_thread() -> None:
    """For the life of the process."""
    controller: Any = ThreadpoolController()
    controller.limit(limits=1, user_api="blas")
