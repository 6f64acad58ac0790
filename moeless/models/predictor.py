"""`Predictor`: the experts that a layer's tokens will use, told before the layer runs; `PredictorSet`: one a layer.

A predictor is the target layer's own router on an earlier vector, with tuned weights (paper section 4.1) and possibly a
low-rank adapter: logits = W x + B gelu(A x). Where the router was good enough as it is, the predictor has no numbers of
its own.

Legend: T tokens, K experts a token, H hidden, E experts, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from moeless.errors import CheckpointError, UnsupportedModelError
from moeless.models.family import MoeLayer
from moeless.models.gate import Gate
from moeless.models.predictor_file import PredictorEntry, TunedWeights, check_fingerprint, read_predictors
from moeless.models.probe import ProbedLayer, probe_layers

Source = Literal["gate-input", "pre-attention"]


class Predictor:
    """Predicts the expert ids of `target_layer`.

    Attributes:
        source: what `predict` reads: `gate-input` is the router input of `source_layer`; `pre-attention` is the input
            of the target's own decoder layer, with `source_layer` == `target_layer` and `distance` 0.
        weights: the numbers that are the predictor's own, None for the untouched router.
    """

    def __init__(
        self,
        point: ProbedLayer,
        *,
        source: Source,
        distance: int,
        weights: TunedWeights | None = None,
        device: torch.device | None = None,
    ) -> None:
        """A predictor of the layer `point`.

        Raises:
            UnsupportedModelError: the layer's router has no linear map, or cannot carry an adapter.
        """
        self.source: Source = source
        self.distance = distance
        self.target_layer = point.layer.ordinal
        self.source_layer = self.target_layer - distance
        self.weights: TunedWeights | None = None
        self.gate = Gate(point)
        if device is not None:
            self.gate.to(device)
        self.norm: nn.Module | None = point.norm if source == "pre-attention" else None
        """The norm in front of the target's router, which a vector from before attention goes through first."""
        self._down_RH: torch.Tensor | None = None
        self.use(weights)

    def use(self, weights: TunedWeights | None) -> None:
        """Take other numbers, or the untouched router's for None. Raises `UnsupportedModelError` as above."""
        gate, self.weights, self._down_RH = self.gate, weights, None
        if weights is None or weights.down_RH is None or weights.up_ER is None:
            gate.set_weight(gate.weight_EH if weights is None else weights.weight_EH)
            return
        if not gate.takes_adapter:
            raise UnsupportedModelError(
                f"the router of layer {self.target_layer} ({type(gate.router).__name__}) cannot carry an adapter; "
                "tune it with --adapter-rank 0"
            )
        gate.set_weight(torch.cat([weights.weight_EH, weights.up_ER.to(weights.weight_EH)], dim=1))
        self._down_RH = weights.down_RH.to(gate.weight_EH)

    @torch.no_grad()
    def predict(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Expert ids [T, K] for source vectors [T, H]: one small product more than the router's own call, or none."""
        return self.predict_normed(x_TH if self.norm is None else self.norm(x_TH))

    __call__ = predict

    @torch.no_grad()
    def predict_normed(self, x_TH: torch.Tensor) -> torch.Tensor:
        """`predict` for source vectors that went through `norm` already, where there is one."""
        if self._down_RH is not None:
            x_TH = x_TH.to(self._down_RH.dtype)
            x_TH = torch.cat([x_TH, F.gelu(F.linear(x_TH, self._down_RH))], dim=1)
        return self.gate.route(x_TH)

    @torch.no_grad()
    def reference_logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The logits [T, E] behind `predict`, term by term and in float32."""
        z_TH = self.gate.linear_input(x_TH if self.norm is None else self.norm(x_TH)).float()
        if self.weights is None:
            return self.gate.logits(z_TH)
        return apply_weights(self.weights, z_TH, self.gate.bias_E)

    @property
    def num_parameters(self) -> int:
        """Tuned numbers: E·H, plus R·(H + E) with an adapter; 0 for the untouched router."""
        return 0 if self.weights is None else self.weights.num_parameters


def apply_weights(weights: TunedWeights, z_TH: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
    """W z + b + B gelu(A z) in float32, [T, E]; differentiable."""
    logits_TE = F.linear(z_TH, weights.weight_EH.float(), None if bias_E is None else bias_E.float())
    if weights.down_RH is None or weights.up_ER is None:
        return logits_TE
    return logits_TE + F.linear(F.gelu(F.linear(z_TH, weights.down_RH.float())), weights.up_ER.float())


class PredictorSet:
    """At most one predictor for each MoE layer of a model, by the layer's ordinal."""

    def __init__(self, predictors: list[Predictor | None]) -> None:
        self.predictors = predictors

    @staticmethod
    def load(
        folder: Path,
        *,
        model: PreTrainedModel,
        layers: list[MoeLayer],
        points: list[ProbedLayer] | None = None,
        distance: int | None = None,
    ) -> PredictorSet:
        """Read a predictor folder for `model`, which may lack its experts.

        Args:
            folder: what `moeless finetune --out` wrote.
            model: the model it is for, before anything took the place of its attention or experts.
            layers: its MoE layers.
            points: its probed layers if they are known; otherwise a pass of four tokens finds them.
            distance: which distance to take; by default the folder's smallest. Layers that no router input that far
                back exists for use their own input before attention (`pre-attention`).

        Raises:
            CheckpointError: missing or damaged folder, made for another model (naming the field that differs), or
                without predictors for `distance`.
        """
        if points is None:
            with _experts_answer_zeros(layers):
                points = probe_layers(model, layers, model.get_input_embeddings().weight.device)  # type: ignore[arg-type]
        entries = read_entries(folder, model, points)
        distances = sorted({entry.distance for entry in entries})
        if distance is None:
            distance = next((d for d in distances if d), 0)
        if distance not in distances:
            raise CheckpointError(
                f"{str(folder)!r} has no predictors for distance {distance}, only {', '.join(map(str, distances))}"
            )
        by_key = {(entry.distance, entry.target_layer): entry for entry in entries}
        chosen = [
            by_key.get((distance, point.layer.ordinal)) or by_key.get((0, point.layer.ordinal)) for point in points
        ]
        return PredictorSet([make_predictor(p, e) if e else None for p, e in zip(points, chosen, strict=True)])

    def for_target(self, layer: int) -> Predictor | None:
        """The predictor of MoE layer number `layer`; None where history has to do."""
        return self.predictors[layer]

    @property
    def num_parameters(self) -> int:
        """Tuned numbers of all layers."""
        return sum(p.num_parameters for p in self.predictors if p is not None)


def read_entries(folder: Path, model: PreTrainedModel, points: list[ProbedLayer]) -> list[PredictorEntry]:
    """All entries of a predictor folder that was made for `model`. Raises `CheckpointError` as `PredictorSet.load`."""
    header, entries = read_predictors(folder)
    check_fingerprint(folder, header, model, points)
    if any(not 0 <= entry.target_layer < len(points) for entry in entries):
        raise CheckpointError(f"{str(folder)!r} names layers that the model does not have; tune again")
    return entries


def make_predictor(point: ProbedLayer, entry: PredictorEntry) -> Predictor | None:
    """The predictor of an entry; None for the verdict `no-source`.

    Raises:
        CheckpointError: the entry's weights do not fit the router.
    """
    if entry.verdict == "no-source":
        return None
    if entry.weights is not None and entry.weights.weight_EH.shape[0] != point.layer.num_experts:
        raise CheckpointError(
            f"the predictor of layer {entry.target_layer} has {entry.weights.weight_EH.shape[0]} rows for a router of "
            f"{point.layer.num_experts} experts; tune again"
        )
    return Predictor(point, source=entry.source, distance=entry.distance, weights=entry.weights)


@contextmanager
def _experts_answer_zeros(layers: list[MoeLayer]) -> Iterator[None]:
    """Let a model without experts run, for what its routers tell and not for its output."""
    replaced = [vars(layer.experts).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.experts.forward = lambda hidden, *args, **kwargs: torch.zeros_like(hidden)
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            del layer.experts.forward
            if forward is not None:
                layer.experts.forward = forward
