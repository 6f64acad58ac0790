"""Predictors of a folder, as the expert layers call them: on the router input of an earlier layer of the same step.

What a layer's experts receive isn't always what its router read (Llama-4 scales it, Gemma-4 norms it differently), so
each router's input is noted where the router takes it.

Legend: T tokens, K experts a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeless.errors import UsageError
from moeless.models.checkpoint import LoadedModel
from moeless.models.predictor import Predictor, PredictorSet

Predict = Callable[[torch.Tensor], torch.Tensor]


class RouterInput:
    """The last input of one layer's router."""

    def __init__(self, router: nn.Module) -> None:
        """Note inputs of `router` from here on."""
        self.x_TH: torch.Tensor | None = None
        router.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self.x_TH = x.reshape(-1, x.shape[-1])


def load_foresight(folder: Path, loaded: LoadedModel, distance: int | None) -> tuple[list[Predict | None], int]:
    """A predictor for each MoE layer, None where there is none, and the layers between its input and its target.

    Call it before anything takes the place of the model's attention or experts. Layers whose predictor reads their own
    input before attention have none here: their counts could not reach the other ranks in time.

    Raises:
        CheckpointError: the folder is damaged, for another model, or has nothing for `distance`.
        UsageError: no predictor of the folder reads a router input.
    """
    found = PredictorSet.load(folder, model=loaded.model, layers=loaded.layers, distance=distance)
    usable = {p.target_layer: p for p in found.predictors if p is not None and p.source == "gate-input"}
    distances = {predictor.distance for predictor in usable.values()}
    if not distances:
        raise UsageError(f"--predictors {folder}: none of its predictors reads the router input of an earlier layer")
    sources = {p.source_layer: RouterInput(loaded.layers[p.source_layer].router) for p in usable.values()}
    predicts = [
        _predict_from(usable[layer], sources[usable[layer].source_layer]) if layer in usable else None
        for layer in range(len(loaded.layers))
    ]
    return predicts, distances.pop()


def _predict_from(predictor: Predictor, source: RouterInput) -> Predict:
    def predict(experts_input: torch.Tensor) -> torch.Tensor:
        """Expert ids [T, K] of the target layer; the argument is the source layer's experts' input."""
        assert source.x_TH is not None, "a layer's router runs before its experts"
        return predictor.predict(source.x_TH)

    return predict
