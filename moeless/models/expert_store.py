"""Single experts out of a checkpoint, without reading the others: the "function image" that replicas start from.

Weights are views of memory-mapped files, so the operating system's page cache holds them once for all ranks of a host
and nothing is copied until `read_into` fills a slot. Where a conversion only stacks and concatenates, the pieces are
copied straight to their place in the slot; any other conversion runs transformers' own operations on one expert.

Legend: E experts, F expert ffn, H hidden.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from moeless.errors import CheckpointError, UnsupportedModelError
from moeless.models.checkpoint_index import CheckpointIndex
from moeless.models.expert_ffn import ExpertFfn
from moeless.models.family import MoeLayer

Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


class ExpertSource(Protocol):
    """Where replicas come from: `ExpertStore`, or weights made up for a benchmark.

    Attributes:
        shapes: parameter name, relative to the experts module, -> shape of one expert's part; the same in all layers.
        ffns: how each layer computes with these weights.
        num_experts: experts of each layer.
        hidden: width of a row.
        dtype: the type in which slots hold weights.
    """

    shapes: Shapes
    ffns: list[ExpertFfn]
    num_experts: int
    hidden: int
    dtype: torch.dtype

    def read_into(self, layer: int, expert: int, out: Weights) -> None:
        """Copy one expert's weights into `out`, tensors of `shapes` on any device."""
        ...


def expert_bytes(source: ExpertSource) -> int:
    """Bytes that one expert's weights take in a slot."""
    return sum(math.prod(shape) for shape in source.shapes.values()) * source.dtype.itemsize


class ExpertStore:
    """The experts of one checkpoint; see `ExpertSource`."""

    def __init__(
        self, index: CheckpointIndex, model: PreTrainedModel, layers: list[MoeLayer], dtype: torch.dtype
    ) -> None:
        """Experts of `layers`, before their parameters are taken out of `model` (which may be on the meta device).

        Raises:
            CheckpointError: an expert's weights are not in the checkpoint.
            UnsupportedModelError: layers with experts of different sizes.
        """
        self._index, self._model = index, model
        self._names = [layer.experts_name for layer in layers]
        self.num_experts = layers[0].num_experts
        self.shapes = _shapes(layers[0])
        self.ffns = [ExpertFfn(layer.experts) for layer in layers]
        self.hidden = int(model.config.get_text_config().hidden_size)
        self.dtype = dtype
        for layer in layers:
            if layer.num_experts != self.num_experts or _shapes(layer) != self.shapes:
                raise UnsupportedModelError(
                    f"layers {layers[0].decoder_layer} and {layer.decoder_layer} have experts of different sizes"
                )
            for name in self.shapes:
                self._check(f"{layer.experts_name}.{name}")
        self._check_shapes()

    def read_into(self, layer: int, expert: int, out: Weights) -> None:
        """See `ExpertSource`. Raises `CheckpointError` when the files have changed or can't be read."""
        try:
            for name, target in out.items():
                offset = 0
                for piece in self._pieces(f"{self._names[layer]}.{name}", expert):
                    if piece.shape[1:] != target.shape[1:]:
                        raise ValueError(f"{name} has rows of {list(piece.shape[1:])}, not {list(target.shape[1:])}")
                    target.narrow(0, offset, piece.shape[0]).copy_(piece)
                    offset += piece.shape[0]
                if offset != target.shape[0]:
                    raise ValueError(f"{offset} rows of {name} where {target.shape[0]} are needed")
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"cannot read expert {expert} of MoE layer {layer}: {error}") from error

    def views(self, layer: int, expert: int) -> dict[str, list[torch.Tensor]]:
        """The pieces of one expert's parameters, to be laid end to end; memory-mapped where no conversion is needed."""
        return {name: list(self._pieces(f"{self._names[layer]}.{name}", expert)) for name in self.shapes}

    def read_reference(self, layer: int, expert: int) -> Weights:
        """One expert through transformers' own operations alone; what `read_into` has to equal."""
        return {name: self._converted(f"{self._names[layer]}.{name}", expert) for name in self.shapes}

    def _pieces(self, parameter: str, expert: int) -> Iterable[torch.Tensor]:
        converter = self._index.converters.get(parameter)
        operations = list(converter.operations) if converter is not None else []
        if not operations:
            return [self._fused(parameter, expert)]
        stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        joins = all(isinstance(op, Concatenate) and op.dim == 1 for op in operations[1:])
        if stacks and joins and len(operations) <= 2:
            sources = self._index.sources[parameter]
            patterns = converter.source_patterns if converter is not None else []
            return [self._index.slice_of(sources[p][expert])[...] for p in patterns if p in sources]
        return [self._converted(parameter, expert)]

    def _fused(self, parameter: str, expert: int) -> torch.Tensor:
        """One expert's rows of a tensor that holds all: [E, ...], or [E*F, H] as in dbrx."""
        ((key,),) = self._index.sources[parameter].values()
        part = self._index.slice_of(key)
        num_rows = part.get_shape()[0]
        if num_rows == self.num_experts:
            return part[expert : expert + 1][0]
        size = num_rows // self.num_experts
        return part[expert * size : (expert + 1) * size]

    def _converted(self, parameter: str, expert: int) -> torch.Tensor:
        converter = self._index.converters.get(parameter)
        if converter is None:
            return self._fused(parameter, expert)
        converter = copy.deepcopy(converter)
        converter.collected_tensors.clear()
        sources = self._index.sources[parameter]
        fused = not any(isinstance(op, MergeModulelist) for op in converter.operations)
        for pattern, keys in sources.items():
            key = keys[0] if fused else keys[expert]
            value: Any = self._fused(parameter, expert).unsqueeze(0) if fused else self._index.slice_of(key)[...]
            converter.add_tensor(parameter, key, str(pattern), value)
        converted = next(iter(converter.convert(parameter, model=self._model, config=self._model.config).values()))
        return (converted[0] if isinstance(converted, list) else converted)[0]

    def _check_shapes(self) -> None:
        """Raise `CheckpointError` unless one expert fits its slot; all others' tensors are like its own."""
        for name, pieces in self.views(0, 0).items():
            made = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
            if made != self.shapes[name]:
                raise CheckpointError(
                    f"{name!r} of an expert has the shape {list(made)} where config.json says {list(self.shapes[name])}"
                )

    def _check(self, parameter: str) -> None:
        """Raise `CheckpointError` unless every expert's tensors are there."""
        sources = self._index.sources.get(parameter)
        converter = self._index.converters.get(parameter)
        stacked = converter is not None and any(isinstance(op, MergeModulelist) for op in converter.operations)
        wanted = self.num_experts if stacked else 1
        complete = sources and all(len(keys) == wanted for keys in sources.values())
        if not complete or (converter is not None and len(sources or ()) != len(converter.source_patterns)):
            found = sorted({len(keys) for keys in (sources or {}).values()}) or [0]
            raise CheckpointError(f"the checkpoint has {found[0]} of the {wanted} tensors that make up {parameter!r}")


def _shapes(layer: MoeLayer) -> Shapes:
    """Shape of one expert's part of each parameter of the experts module."""
    shapes: Shapes = {}
    for name, parameter in layer.experts.named_parameters():
        rows = parameter.shape[0]
        per_expert = rows // layer.num_experts
        shapes[name] = tuple(parameter.shape[1:]) if per_expert == 1 else (per_expert, *parameter.shape[1:])
    return shapes
