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
    """Keeps a step's ids and counts them all at its end, so that a layer pays for no operation and no wait."""

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        """Hook into the layers for good."""
        num_experts = max(layer.num_experts for layer in layers)
        self._shape = len(layers), num_experts
        self._first_cell_L = np.arange(len(layers)) * num_experts
        self._ids: list[torch.Tensor | None] = [None] * len(layers)
        self.traffic = Traffic(len(layers), num_experts, num_ranks=1)
        for layer in layers:
            if layer.experts_receive_ids:
                layer.experts.register_forward_pre_hook(self._on_experts(layer.ordinal), with_kwargs=True)
            else:
                layer.router.register_forward_hook(self._on_router(layer))

    def step_ids(self) -> list[torch.Tensor]:
        """The expert ids of the step's rows, one tensor a layer; before `flush`."""
        ids = [ids for ids in self._ids if ids is not None]
        assert len(ids) == len(self._ids), "every MoE layer runs in every step"
        return ids

    def flush(self) -> None:
        """Hand the step's counts to `traffic`."""
        ids = self.step_ids()
        cells = torch.cat([layer_ids.flatten() for layer_ids in ids]).cpu().numpy()
        cells = cells + np.repeat(self._first_cell_L, [layer_ids.numel() for layer_ids in ids])
        counts = np.bincount(cells, minlength=self._shape[0] * self._shape[1])
        self.traffic.note_whole(counts.reshape(self._shape))
        self._ids = [None] * len(self._ids)

    def _on_experts(self, ordinal: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._ids[ordinal] = args[1] if len(args) > 1 else kwargs["top_k_index"]

        return hook

    def _on_router(self, layer: MoeLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._ids[layer.ordinal] = layer.ids_of(output, layer)

        return hook
