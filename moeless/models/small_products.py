"""Products of few rows with small weights on a CPU: a call's overhead and the reading of weights are all there is.

numpy's BLAS has kernels for small matrices that torch's has not, and they read weights as fast as memory gives them if
these are stored in *panels* of a few outputs, each of which lies in one piece. Results differ from torch's by rounding.

Legend: R rows, H inputs, O outputs, P panels, B outputs of a panel, E experts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import nn

_PANEL_OUTPUTS = 32
_MOST_WEIGHTS = 1 << 17
"""Larger matrices than this are left to torch."""
_MOST_PRODUCTS = 1 << 22
"""Multiplications up to which numpy's product on one thread is about as fast as torch's on several."""


class SmallLinear:
    """Stands in for the forward of an `nn.Linear`; see `install_small_linears`."""

    def __init__(self, linear: nn.Linear) -> None:
        """Copy the layer's weights [O, H] into panels; others may read the layer's own."""
        self._panels = to_panels(linear.weight.detach()).numpy()
        self._bias_O = None if linear.bias is None else linear.bias.detach()
        self._num_outputs = linear.out_features

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """`input` [..., H] times the weights [..., O]."""
        x_RH = input.numpy().reshape(-1, input.shape[-1])
        y_RO = np.empty((len(x_RH), self._num_outputs), np.float32)
        multiply(x_RH, self._panels, y_RO)
        y = torch.from_numpy(y_RO).view(*input.shape[:-1], self._num_outputs)
        return y if self._bias_O is None else y + self._bias_O


def install_small_linears(model: nn.Module, but: nn.Module | None = None) -> None:
    """Have the small linear layers of `model` computed this way, where they are on a CPU in single precision.

    `but` names a module, such as the embeddings, whose weights other modules use too and that stay as they are.
    """
    shared = set() if but is None else {id(weight) for weight in but.parameters()}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in shared and is_small(module):
            module.forward = SmallLinear(module)  # type: ignore[method-assign]


def is_small(module: nn.Module) -> bool:
    """Whether all parameters are on a CPU and in single precision, and none has a large matrix [O, H]."""
    return all(
        w.device.type == "cpu" and w.dtype == torch.float32 and math.prod(w.shape[-2:]) <= _MOST_WEIGHTS
        for w in module.parameters()
    )


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """Weights [..., O, H] as panels [..., P, H, B]."""
    panel = math.gcd(weight.shape[-2], _PANEL_OUTPUTS)
    return weight.unflatten(-2, (-1, panel)).transpose(-2, -1).contiguous()


def multiply(x_RH: NDArray[np.float32], panels_PHB: NDArray[np.float32], y_RO: NDArray[np.float32]) -> None:
    """Write the product of rows and weights to `y_RO`."""
    num_panels, num_inputs, size = panels_PHB.shape
    if len(x_RH) * panels_PHB.size <= _MOST_PRODUCTS:
        np.matmul(x_RH, panels_PHB, out=y_RO.reshape(-1, num_panels, size).swapaxes(0, 1))
    else:
        weight_HO = torch.from_numpy(panels_PHB.swapaxes(0, 1).reshape(num_inputs, -1))
        torch.mm(torch.from_numpy(x_RH), weight_HO, out=torch.from_numpy(y_RO))


def multiply_by_expert(x_RH: torch.Tensor, panels_EPHB: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Each expert's rows times its weights [R, O]; rows come in order of expert."""
    x, panels = x_RH.numpy(), panels_EPHB.numpy()
    y = np.empty((len(x), panels.shape[1] * panels.shape[3]), np.float32)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start := start + count)
            multiply(x[rows], panels[expert], y[rows])
    return torch.from_numpy(y)


def hold_blas_to_one_thread() -> None:
    """Keep numpy's BLAS, for the life of the process, from starting threads beside torch's on the same cores."""
    controller: Any = ThreadpoolController()
    controller.limit(limits=1, user_api="blas")
