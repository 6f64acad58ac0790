"""Tuning one (source, target layer) on a capture: judge the untouched router, train if it falls short, keep the better.

Legend: T tokens, N rows of a part of the split, K experts a token, E experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from moeless.models.predictor import Predictor, Source
from moeless.models.predictor_file import PredictorEntry, TunedWeights, Verdict
from moeless.models.probe import ProbedLayer
from moeless.train.accuracy import Judge
from moeless.train.inputs import CHANNEL_OF, SourceRows, Truth
from moeless.train.split import Split, split_documents
from moeless.train.store import CaptureStore
from moeless.train.tuner import Recipe, Tuner

PAGE_BYTES = 256 * 2**20
"""Rows of one channel and layer held in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One predictor to be: what it reads, and which layer it is for."""

    source: Source
    target: int
    distance: int

    @property
    def key(self) -> str:
        """Its name in the predictor folder."""
        return f"d{self.distance}.layer{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A finished capture with all that tuning and judging need."""

    points: list[ProbedLayer]
    store: CaptureStore
    split: Split
    select: Judge
    test: Judge
    device: torch.device

    @staticmethod
    def split_up(
        points: list[ProbedLayer], store: CaptureStore, *, seed: int, batch_tokens: int, device: torch.device
    ) -> Captured:
        """Split a capture by documents. Raises `DataError` when it has too few."""
        split = split_documents(store.column("documents"), seed)
        select, test = (Judge(store, mask, batch_tokens) for mask in (split.select, split.test))
        return Captured(points=points, store=store, split=split, select=select, test=test, device=device)

    def ids(self, layer: int) -> torch.Tensor:
        """Experts used at a layer [T, K], int64."""
        return self.store.column("ids", layer).long()

    def source_rows(self, predictor: Predictor) -> SourceRows:
        """What `predictor` reads, already through its norm."""
        return SourceRows(
            self.store,
            CHANNEL_OF[predictor.source],
            predictor.source_layer,
            budget_bytes=PAGE_BYTES,
            device=self.device,
            prepare=predictor.norm,
        )


def plan_pairs(distances: tuple[int, ...], num_layers: int, *, has_layer_input: bool = True) -> list[Pair]:
    """Gate inputs d layers back wherever there are any, and the first layers' own input before attention.

    Without distances it is every layer's input before attention.
    """
    first = range(min(distances[-1], num_layers) if distances else num_layers)
    pairs = [Pair(source="pre-attention", target=t, distance=0) for t in first if has_layer_input]
    return pairs + [Pair(source="gate-input", target=t, distance=d) for d in distances for t in range(d, num_layers)]


def predict_rows(predictor: Predictor, inputs: SourceRows, rows_N: torch.Tensor) -> np.ndarray:
    """Predicted ids [N, K] for the captured rows of ascending numbers `rows_N`."""
    parts = []
    for first, x_TH in inputs.pages():
        low, high = torch.searchsorted(rows_N, torch.tensor([first, first + len(x_TH)])).tolist()
        wanted = (rows_N[low:high] - first).to(x_TH.device)
        if len(wanted):
            parts.append(predictor.predict_normed(x_TH[wanted]).cpu())
    return torch.cat(parts).numpy()


class PairTuner:
    """Everything about one pair; `tune` does the work."""

    def __init__(self, captured: Captured, pair: Pair, recipe: Recipe, metric: str, accelerator: Accelerator) -> None:
        """`metric` is a key of what `Judge` gives."""
        self.captured, self.pair, self.recipe, self.metric = captured, pair, recipe, metric
        self.accelerator = accelerator
        self.predictor = Predictor(
            captured.points[pair.target], source=pair.source, distance=pair.distance, device=captured.device
        )
        self.inputs = captured.source_rows(self.predictor)
        self.ids_TK = captured.ids(pair.target)

    def tune(self, deadline_s: float = float("inf")) -> PredictorEntry:
        """The pair's entry; `deadline_s` is on `time.monotonic`'s clock."""
        began_s = time.monotonic()
        before = self.judge(self.captured.test, None)
        if before[self.metric] >= self.recipe.threshold:
            return self._entry("kept", began_s, before)
        select_before = self.judge(self.captured.select, None)[self.metric]
        trial = self._tuner().best(deadline_s)
        stored = _as_stored(trial.weights, self.predictor)
        after = self.judge(self.captured.test, stored)
        if trial.accuracy <= select_before or after[self.metric] < before[self.metric]:
            return self._entry("rejected", began_s, before, loss=trial.loss, rank=stored.rank)
        verdict: Verdict = "tuned" if after[self.metric] >= self.recipe.threshold else "tuned-below-h"
        return self._entry(verdict, began_s, before, loss=trial.loss, rank=stored.rank, after=after, weights=stored)

    def judge(self, part: Judge, weights: TunedWeights | None) -> dict[str, float]:
        """Accuracy on a part of the split with these numbers, or with the untouched router's."""
        self.predictor.use(weights)
        predicted_NK = predict_rows(self.predictor, self.inputs, part.rows_N)
        return part.judge(predicted_NK, self.ids_TK[part.rows_N].numpy(), self.predictor.gate.num_experts)

    def _tuner(self) -> Tuner:
        captured, gate, pair = self.captured, self.predictor.gate, self.pair
        return Tuner(
            gate,
            self.inputs,
            Truth.read(captured.store, gate, pair.target, budget_bytes=PAGE_BYTES, device=captured.device),
            captured.split.train,
            recipe=self.recipe,
            seed=self.recipe.seed * 1_000_003 + pair.distance * 10_007 + pair.target,
            accelerator=self.accelerator,
            score=lambda weights: self.judge(captured.select, weights)[self.metric],
        )

    def _entry(
        self,
        verdict: Verdict,
        began_s: float,
        before: dict[str, float],
        *,
        loss: str | None = None,
        rank: int = 0,
        after: dict[str, float] | None = None,
        weights: TunedWeights | None = None,
    ) -> PredictorEntry:
        after = before if after is None else after
        return PredictorEntry(
            source=self.pair.source,
            source_layer=self.pair.target - self.pair.distance,
            target_layer=self.pair.target,
            distance=self.pair.distance,
            verdict=verdict,
            loss=loss,
            adapter_rank=rank,
            before=before[self.metric],
            after=after[self.metric],
            metrics_before=before,
            metrics_after=after,
            seconds=time.monotonic() - began_s,
            weights=weights,
        )


def _as_stored(weights: TunedWeights, predictor: Predictor) -> TunedWeights:
    """Numbers in the router's own precision and on the CPU: what the file holds, and what is judged."""
    dtype = predictor.gate.weight_EH.dtype
    down, up = weights.down_RH, weights.up_ER
    return TunedWeights(
        weight_EH=weights.weight_EH.to("cpu", dtype),
        down_RH=None if down is None else down.to("cpu", dtype),
        up_ER=None if up is None else up.to("cpu", dtype),
    )
