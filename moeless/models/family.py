"""Where a MoE model keeps its routers and experts, for any family whose experts transformers dispatches.

58 of the 63 MoE families of transformers mark their experts class with `use_experts_implementation` and name their
router class in `_can_record_outputs`; both are found generically. Two families that do neither or only half get an
entry in `OVERRIDES`; families that cannot work are in `REFUSED`, by name and with the reason.

Legend: T tokens, K experts a token, H hidden, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from moeless.errors import UnsupportedModelError

REFUSED: dict[str, str] = {
    "jetmoe": "it routes attention heads through a second router in every layer",
    "zaya": "its routers keep state from layer to layer",
    "inkling": "its routers share parameters and have several outputs",
    "inkling_text": "its routers share parameters and have several outputs",
    "inkling2_text": "its routers share parameters and have several outputs",
    "inkling2_loop_text": "its routers share parameters and have several outputs",
    "deepseek_v4": "its early layers route by a hash of the token id, not by a gate",
    "longcat_flash": "it has experts that compute nothing",
    "step3p7": "its experts cannot be replaced one by one",
}

RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeLayer:
    """One MoE layer of a model: modules, their names, and how its router's output becomes expert ids."""

    ordinal: int
    """Position among the model's MoE layers, from 0; this is "layer l" everywhere in the project."""
    decoder_layer: int
    """The number in the module name; differs from `ordinal` when some layers are dense."""
    decoder_name: str
    decoder: nn.Module
    router_name: str
    router: nn.Module
    experts_name: str
    experts: nn.Module
    num_experts: int
    ids_of: Callable[[Any, MoeLayer], torch.Tensor]
    """Router output -> expert ids [T, K] of the experts it chose."""

    def route(self, x_TH: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Expert ids [T, K] that this layer's router gives for `x_TH` [T, H]; further arguments go to the router."""
        return self.ids_of(self.router(x_TH, *args, **kwargs), self)

    @property
    def experts_receive_ids(self) -> bool:
        """Whether the experts module is called with (hidden, ids, weights), so that its ids are the truth."""
        return _is_decorated(self.experts) or type(self.experts).__name__ == "DbrxExperts"


def _integer_output(output: Any, layer: MoeLayer) -> torch.Tensor:
    """The ids among a router's (logits, weights, ids)."""
    return next(t for t in output if not t.is_floating_point())


def _llama4_ids(output: Any, layer: MoeLayer) -> torch.Tensor:
    """Llama-4 routers return (dense scores, logits) and choose by logits."""
    return output[1].topk(layer.router.top_k, dim=-1).indices


def _dbrx_ids(output: Any, layer: MoeLayer) -> torch.Tensor:
    """Dbrx routers return bare logits; the block takes the top-k of their softmax."""
    top_k = layer.router.moeless_top_k
    return output.softmax(dim=-1, dtype=output.dtype).topk(top_k, dim=-1).indices


@dataclass(frozen=True, slots=True)
class FamilyOverride:
    """Class names and id rule of a family whose experts transformers does not dispatch."""

    router_class: str
    experts_class: str
    ids_of: Callable[[Any, MoeLayer], torch.Tensor]


OVERRIDES: dict[str, FamilyOverride] = {
    "llama4": FamilyOverride("Llama4Router", "Llama4TextExperts", _llama4_ids),
    "llama4_text": FamilyOverride("Llama4Router", "Llama4TextExperts", _llama4_ids),
    "dbrx": FamilyOverride("DbrxRouter", "DbrxExperts", _dbrx_ids),
}


def find_moe_layers(model: PreTrainedModel) -> list[MoeLayer]:
    """All MoE layers in order; works on meta models too.

    Raises:
        UnsupportedModelError: a dense model, or a family that cannot work here.
    """
    family = model.config.model_type
    text_family = model.config.get_text_config().model_type
    for name in (family, text_family):
        if name in REFUSED:
            raise UnsupportedModelError(f"{name} models are not supported: {REFUSED[name]}")
    override = OVERRIDES.get(text_family) or OVERRIDES.get(family)
    routers, experts = _overridden(model, override) if override else _decorated(model)
    if not routers and not experts:
        raise UnsupportedModelError(f"{family!r} ({type(model).__name__}) is a dense model: it has no MoE layer")
    if set(routers) != set(experts):
        raise UnsupportedModelError(
            f"{family} models are not supported: {len(routers)} layers with a router but {len(experts)} with experts"
        )
    return [
        MoeLayer(
            ordinal=ordinal,
            decoder_layer=int(name.rpartition(".")[2]),
            decoder_name=name,
            decoder=model.get_submodule(name),
            router_name=routers[name],
            router=model.get_submodule(routers[name]),
            experts_name=experts[name],
            experts=model.get_submodule(experts[name]),
            num_experts=int(model.get_submodule(experts[name]).num_experts),  # type: ignore[arg-type]
            ids_of=override.ids_of if override else _integer_output,
        )
        for ordinal, name in enumerate(sorted(routers, key=lambda n: int(n.rpartition(".")[2])))
    ]


def experts_per_token(model: PreTrainedModel, layers: Sequence[MoeLayer]) -> int | None:
    """Experts a token, by the routers or else the configuration; None where they don't say, or differ."""
    config = model.config.get_text_config()
    given = {
        getattr(layer.router, "top_k", None)
        or getattr(layer.router, "moeless_top_k", None)
        or getattr(config, "num_experts_per_tok", None)
        for layer in layers
    }
    top_k = given.pop() if len(given) == 1 else None
    return top_k if isinstance(top_k, int) else None


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether several documents can share one row of a batch: not where a layer carries a recurrent state."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    return not (layer_types & RECURRENT_LAYER_TYPES or getattr(model, "_is_stateful", False))


def _decorated(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, str]]:
    """Routers by the class that the family records, where it records one, else by the name of the class."""
    experts = [name for name, module in model.named_modules() if _is_decorated(module)]
    classes: list[type] = []
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        recorded = recorders.get("router_logits") or []
        classes += [
            r.target_class
            for r in (recorded if isinstance(recorded, list) else [recorded])
            if isinstance(r, OutputRecorder)
        ]
    routers = [n for n, m in model.named_modules() if classes and isinstance(m, tuple(classes))]
    if not routers:
        inside = tuple(f"{name}." for name in experts)
        named = ((n, type(m).__name__) for n, m in model.named_modules() if not n.startswith(inside or "-"))
        routers = [name for name, class_name in named if experts and class_name.endswith(("Router", "Gate"))]
    return _by_decoder_layer(model, routers), _by_decoder_layer(model, experts)


def _is_decorated(module: nn.Module) -> bool:
    """Whether transformers dispatches this experts module: its decorator leaves these attributes."""
    return hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")


def _overridden(model: PreTrainedModel, override: FamilyOverride) -> tuple[dict[str, str], dict[str, str]]:
    routers = [n for n, m in model.named_modules() if type(m).__name__ == override.router_class]
    experts = [n for n, m in model.named_modules() if type(m).__name__ == override.experts_class]
    for name in routers:
        block = model.get_submodule(name.rpartition(".")[0])
        if override.ids_of is _dbrx_ids:  # the router does not know its k; its block does
            model.get_submodule(name).moeless_top_k = block.top_k
    return _by_decoder_layer(model, routers), _by_decoder_layer(model, experts)


def _by_decoder_layer(model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """Module names keyed by the name of the decoder layer they lie in (up to the last number in the name)."""
    found: dict[str, str] = {}
    for name in names:
        match = re.match(r"(.*\.\d+)\.", name)
        if match is None or match.group(1) in found:
            where = f"two routers or experts modules in {match.group(1)}" if match else f"{name} is outside any layer"
            raise UnsupportedModelError(f"{model.config.model_type} models are not supported: {where}")
        found[match.group(1)] = name
    return found
