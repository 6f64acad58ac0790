"""What only a forward pass tells about a MoE layer: the norm its router reads, the router's other arguments, its top-k.

One pass of a few tokens also checks that the ids a router gives are the ids its experts receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moeless.errors import UnsupportedModelError
from moeless.models.family import MoeLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLayer:
    """One MoE layer with what a forward pass showed."""

    layer: MoeLayer
    top_k: int
    norm: nn.Module | None
    """The module whose output the router reads, None where it reads the residual stream itself."""
    router_args: tuple[Any, ...]
    router_kwargs: dict[str, Any]
    """What the router is called with beside the hidden states, such as a correction bias that lies on the block."""
    router_takes_batches: bool
    """Whether the router is called with [B, S, H]; a few families rely on it."""

    def route(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Expert ids [T, K] of this layer's own router for any `x_TH` [T, H]."""
        return self.layer.route(self.as_called(x_TH), *self.router_args, **self.router_kwargs)

    def as_called(self, x_TH: torch.Tensor) -> torch.Tensor:
        """`x_TH` [T, H] in the number of dimensions that the router is called with."""
        return x_TH.unsqueeze(0) if self.router_takes_batches else x_TH


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states of a module call: by position or by their usual name."""
    return args[0] if args else kwargs["hidden_states"]


@torch.no_grad()
def probe_layers(model: PreTrainedModel, layers: list[MoeLayer], device: torch.device) -> list[ProbedLayer]:
    """Run four tokens through the model and note what each MoE layer does.

    Raises:
        UnsupportedModelError: a router's ids are not those its experts were called with.
    """
    calls: list[dict[str, Any]] = [{"outputs": []} for _ in layers]
    handles: list[Any] = []
    try:
        for layer, call in zip(layers, calls, strict=True):
            handles += _observe(layer, call)
        ids = torch.arange(4, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [_probed(model, layer, call) for layer, call in zip(layers, calls, strict=True)]


def _observe(layer: MoeLayer, call: dict[str, Any]) -> list[Any]:
    """Hooks that note the calls of router and experts and the outputs of every module before the router."""

    def on_router(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = hidden_argument(args, kwargs)
        others = {k: v for k, v in kwargs.items() if k != "hidden_states"}
        call.update(input=hidden, args=args[1:], kwargs=others, ids=layer.ids_of(output, layer))

    def on_experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call["used_ids"] = args[1] if len(args) > 1 else kwargs["top_k_index"]

    def on_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, torch.Tensor) and "input" not in call:
            call["outputs"].append((module, output))

    inside = {id(m) for m in (*layer.router.modules(), *layer.experts.modules())}
    handles = [m.register_forward_hook(on_module) for m in layer.decoder.modules() if id(m) not in inside]
    handles.append(layer.router.register_forward_hook(on_router, with_kwargs=True))
    if layer.experts_receive_ids:
        handles.append(layer.experts.register_forward_pre_hook(on_experts, with_kwargs=True))
    return handles


def _probed(model: PreTrainedModel, layer: MoeLayer, call: dict[str, Any]) -> ProbedLayer:
    ids, used_ids = call["ids"], call.get("used_ids", call["ids"])
    if not torch.equal(ids.sort(-1).values, used_ids.sort(-1).values.to(ids.dtype)):
        raise UnsupportedModelError(
            f"{model.config.model_type} models are not supported: the ids of {layer.router_name} are not those that "
            f"{layer.experts_name} uses"
        )
    x = call["input"]
    norms = [
        module
        for module, output in call["outputs"]
        if output.numel() == x.numel()
        and any(True for _ in module.parameters())
        and torch.equal(output.reshape(x.shape), x)
    ]
    return ProbedLayer(
        layer=layer,
        top_k=ids.shape[-1],
        norm=norms[0] if norms else None,
        router_args=tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in call["args"]),
        router_kwargs=call["kwargs"],
        router_takes_batches=x.dim() == 3,
    )
