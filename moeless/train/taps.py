"""Hooks that record what routers read and which experts were used, and are always removed.

The routing truth is the ids that the experts module is called with, never a top-k of logits: that is wrong for
families with sigmoid scores, correction biases or expert groups.

Legend: T tokens, K experts a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from moeless.models.probe import ProbedLayer, hidden_argument

Channel = Literal["gate_input", "residual", "layer_input"]


@dataclass(slots=True)
class LayerTap:
    """What one layer recorded, one entry a forward pass."""

    gate_input: list[torch.Tensor] = field(default_factory=list)
    """Router input [T, H]."""
    ids: list[torch.Tensor] = field(default_factory=list)
    """Experts used [T, K]."""
    residual: list[torch.Tensor] = field(default_factory=list)
    """Input [T, H] of the norm in front of the router: the residual stream after attention."""
    layer_input: list[torch.Tensor] = field(default_factory=list)
    """Input [T, H] of the decoder layer: the residual stream before attention."""


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


@contextmanager
def tapped(points: list[ProbedLayer], channels: tuple[Channel, ...]) -> Iterator[list[LayerTap]]:
    """Record the forward passes inside the block; one `LayerTap` for each of `points`, in order."""
    taps = [LayerTap() for _ in points]
    handles: list[Any] = []
    try:
        for point, tap in zip(points, taps, strict=True):
            handles += _hooks(point, tap, channels)
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def _hooks(point: ProbedLayer, tap: LayerTap, channels: tuple[Channel, ...]) -> list[Any]:
    layer = point.layer

    def on_router(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tap.gate_input.append(_rows(hidden_argument(args, kwargs)))
        if not layer.experts_receive_ids:
            tap.ids.append(layer.ids_of(output, layer).detach())

    def on_experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.ids.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).detach())

    def on_norm(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.residual.append(_rows(hidden_argument(args, kwargs)))

    def on_decoder(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.layer_input.append(_rows(hidden_argument(args, kwargs)))

    handles = [layer.router.register_forward_hook(on_router, with_kwargs=True)]
    if layer.experts_receive_ids:
        handles.append(layer.experts.register_forward_pre_hook(on_experts, with_kwargs=True))
    if "residual" in channels and point.norm is not None:
        handles.append(point.norm.register_forward_pre_hook(on_norm, with_kwargs=True))
    if "layer_input" in channels:
        handles.append(layer.decoder.register_forward_pre_hook(on_decoder, with_kwargs=True))
    return handles
