"""What one expert computes, for any family whose experts transformers dispatches, and for llama4 and dbrx.

The experts module is kept for its settings and its gate only; the weights come from a slot.

Legend: R rows, H hidden, F expert ffn, S experts side by side, O output size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moeless.errors import UnsupportedModelError

Weights = dict[str, torch.Tensor]
Product = Callable[[torch.Tensor, str], torch.Tensor]
"""(rows [R, H] in order of expert, name of a weight) -> each expert's rows times its weight [R, O]."""


class ExpertFfn:
    """A function (rows [R, H], one expert's weights) -> rows [R, H].

    Weights are named as the parameters of the experts module and shaped like one expert's part of them.
    """

    def __init__(self, experts: nn.Module) -> None:
        """Raises `UnsupportedModelError` for an experts module of an unknown kind."""
        kind = type(experts).__name__
        self._module: Any = experts
        if kind == "Llama4TextExperts":
            self._compute = self._llama4
        elif kind == "DbrxExperts":
            self._compute = self._dbrx
        elif is_usual(experts):
            self._compute = self._gated if experts.has_gate else self._plain
        else:
            raise UnsupportedModelError(f"experts of class {kind} cannot be computed one by one")

    @property
    def can_group(self) -> bool:
        """Whether `grouped` works: not for the kinds without a fused up projection a slot."""
        return self._compute in (self._gated, self._plain)

    def grouped(
        self, rows_RH: torch.Tensor, weights: Weights, counts: list[int], multiply: Product | None = None
    ) -> torch.Tensor:
        """Several experts with two grouped products: each weight has a leading dimension of experts, rows in order.

        `multiply` stands in for torch's grouped product.
        """
        module, multiply = self._module, multiply or _grouped_product(self._module, weights, counts)

        has_biases = any(name.endswith("_bias") for name in weights)
        counts_S = torch.tensor(counts if has_biases else (), device=rows_RH.device)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            y = multiply(x, name)
            bias_SO = weights.get(f"{name}_bias")
            return y if bias_SO is None else y + bias_SO.repeat_interleave(counts_S, 0, output_size=x.shape[0])

        inner = module._apply_gate(linear(rows_RH, "gate_up_proj")) if module.has_gate else None
        return linear(module.act_fn(linear(rows_RH, "up_proj")) if inner is None else inner, "down_proj")

    def __call__(self, rows_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The expert's output for each row."""
        return self._compute(rows_RH, weights)

    def _gated(self, rows_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
        both_R2F = self._linear(rows_RH, weights, "gate_up_proj")
        return self._linear(self._module._apply_gate(both_R2F), weights, "down_proj")

    def _plain(self, rows_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._linear(self._module.act_fn(self._linear(rows_RH, weights, "up_proj")), weights, "down_proj")

    def _llama4(self, rows_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
        gate_RF, up_RF = (rows_RH @ weights["gate_up_proj"]).chunk(2, dim=-1)
        return (up_RF * self._module.act_fn(gate_RF)) @ weights["down_proj"]

    def _dbrx(self, rows_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._module.mlp(rows_RH, weights["mlp.w1"], weights["mlp.v1"], weights["mlp.w2"])

    def _linear(self, x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
        if self._module.is_transposed:
            y = x @ weights[name]
            bias = weights.get(f"{name}_bias")
            return y if bias is None else y + bias
        return F.linear(x, weights[name], weights.get(f"{name}_bias"))


def _grouped_product(module: Any, weights: Weights, counts: list[int]) -> Product:
    device = next(iter(weights.values())).device
    ends_S = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)

    def multiply(x_RH: torch.Tensor, name: str) -> torch.Tensor:
        weight_SHO = weights[name] if module.is_transposed else weights[name].transpose(-2, -1)
        return F.grouped_mm(x_RH, weight_SHO, offs=ends_S)

    return multiply


def is_usual(experts: nn.Module) -> bool:
    """Whether an experts module is one of transformers' two usual kinds, the gated and the plain one."""
    return hasattr(experts, "is_transposed") and not getattr(experts, "has_post_expert_norm", False)
