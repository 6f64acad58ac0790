"""Counts the experts of a model that runs whole on one rank, where no expert layer of ours sees the ids.

Legend: T tokens, K experts a token, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from moeless.engine.traffic import Traffic
from moeless.models.family import MoeLayer


class LayerTap:
    """Sums counts on the device, so that a step waits for it once rather than in every layer."""

    def __init__(self, layers: Sequence[MoeLayer], device: torch.device) -> None:
        """Hook into the layers for good."""
        num_experts = max(layer.num_experts for layer in layers)
        self._counts_LE = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._ready_EG = np.ones((num_experts, 1), bool)
        self.traffic = Traffic(len(layers), num_experts, num_ranks=1)
        for layer in layers:
            if layer.experts_receive_ids:
                layer.experts.register_forward_pre_hook(self._on_experts(layer.ordinal), with_kwargs=True)
            else:
                layer.router.register_forward_hook(self._on_router(layer))

    def flush(self) -> None:
        """Hand the step's counts to `traffic`."""
        counts_LE = self._counts_LE.cpu().numpy()
        for ordinal, counts_E in enumerate(counts_LE):
            self.traffic.note(ordinal, counts_E[None], counts_E[:, None], self._ready_EG, None)
        self._counts_LE.zero_()

    def _count(self, ordinal: int, ids_TK: torch.Tensor) -> None:
        ids = ids_TK.reshape(-1)
        self._counts_LE[ordinal].scatter_add_(0, ids.long(), self._one.expand(len(ids)))

    def _on_experts(self, ordinal: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._count(ordinal, args[1] if len(args) > 1 else kwargs["top_k_index"])

        return hook

    def _on_router(self, layer: MoeLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._count(layer.ordinal, layer.ids_of(output, layer))

        return hook
