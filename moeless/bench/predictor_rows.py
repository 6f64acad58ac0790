"""Collects what every predictor scored: a row a layer, and their means by predictor and distance.

Legend: N held-out rows, K experts a token, E experts, I iterations.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeless.models.predictor_file import PredictorEntry
from moeless.train.pairs import Captured, Pair
from moeless.train.scores import PearsonSum

METRICS = ("token_recall", "exact_set", "load_accuracy", "straggler_recall")
DENSITY_BINS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Which predictor of which layer a score is of, and what its training says."""

    pair: Pair
    entry: PredictorEntry | None = None
    num_epochs: int | None = None


class PredictorRows:
    """Judges predictions on the test part of a capture."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._layers: list[dict[str, Any]] = []
        self._pearson: dict[tuple[str, int], PearsonSum] = defaultdict(PearsonSum)
        self._density: dict[tuple[str, int], np.ndarray] = {}

    def add(
        self,
        name: str,
        outcome: Outcome,
        predicted_NK: np.ndarray,
        *,
        loads_IE: np.ndarray | None = None,
        num_parameters: int = 0,
        num_bytes: int = 0,
        fit_seconds: float = 0.0,
        predict_us: dict[str, float] | None = None,
    ) -> None:
        """Score predicted ids, and loads where they are predicted apart from ids."""
        pair, test = outcome.pair, self.captured.test
        actual_NK = self.captured.ids(pair.target)[test.rows_N].numpy()
        num_experts = self.captured.points[pair.target].layer.num_experts
        predicted_IE = test.loads(predicted_NK, num_experts) if loads_IE is None else loads_IE
        key = (name, pair.distance)
        scores = test.judge_loads(predicted_NK, predicted_IE, actual_NK, self._pearson[key])
        self._add_density(key, predicted_IE, test.loads(actual_NK, num_experts))
        entry = outcome.entry
        self._layers.append(
            {
                "predictor": name,
                "distance": pair.distance,
                "source_layer": pair.target - pair.distance,
                "target_layer": pair.target,
                **scores,
                "num_parameters": num_parameters,
                "bytes": num_bytes,
                "fit_seconds": fit_seconds,
                "predict_us": predict_us,
                "verdict": entry.verdict if entry else None,
                "loss": entry.loss if entry else None,
                "adapter_rank": entry.adapter_rank if entry else None,
                "num_epochs": outcome.num_epochs,
            }
        )

    def result(self) -> dict[str, Any]:
        """`rows` (means over layers), `layers`, and `density` of predicted against actual load shares."""
        keys = list(dict.fromkeys((row["predictor"], row["distance"]) for row in self._layers))
        return {
            "rows": [self._row(*key) for key in keys],
            "layers": self._layers,
            "density": [
                {"predictor": name, "distance": distance, "counts": counts.tolist()}
                for (name, distance), counts in self._density.items()
                if counts.any()
            ],
        }

    def _row(self, name: str, distance: int) -> dict[str, Any]:
        layers = [row for row in self._layers if (row["predictor"], row["distance"]) == (name, distance)]
        timings = [row["predict_us"] for row in layers if row["predict_us"]]
        return {
            "predictor": name,
            "distance": distance,
            **{metric: float(np.mean([row[metric] for row in layers])) for metric in METRICS},
            "pearson": self._pearson[name, distance].r(),
            "num_layers": len(layers),
            "num_parameters": sum(row["num_parameters"] for row in layers),
            "bytes": sum(row["bytes"] for row in layers),
            "fit_seconds": sum(row["fit_seconds"] for row in layers),
            "predict_us": {b: float(np.mean([t[b] for t in timings])) for b in timings[0]} if timings else None,
        }

    def _add_density(self, key: tuple[str, int], predicted_IE: np.ndarray, actual_IE: np.ndarray) -> None:
        """Count (predicted, actual) load shares, times E so that 1 is the fair share, in bins of 0..4."""
        x, y = (loads / loads.sum(1, keepdims=True) * loads.shape[1] for loads in (predicted_IE, actual_IE))
        edges = np.linspace(0, 4, DENSITY_BINS + 1)
        counts = np.histogram2d(np.minimum(x.ravel(), 4), np.minimum(y.ravel(), 4), bins=[edges, edges])[0]
        self._density[key] = self._density.get(key, 0) + counts.astype(np.int64)
