"""Running sums of the accuracy metrics, so that scoring needs no memory of past tokens.

Legend: T tokens, K experts a token, E experts, N iterations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moeless import metrics


@dataclass(slots=True)
class PredictionScore:
    """Token metrics over all tokens and load metrics over all iterations of one predictor at one layer."""

    num_tokens: int = 0
    num_iterations: int = 0
    hits: int = 0
    top_k: int = 0
    exact: int = 0
    load_accuracy_sum: float = 0.0
    straggler_sum: float = 0.0

    def add_tokens(self, predicted_TK: np.ndarray, actual_TK: np.ndarray) -> None:
        """Compare expert ids token by token."""
        hits_T = metrics.token_hits(predicted_TK, actual_TK)
        self.top_k = actual_TK.shape[1]
        self.num_tokens += len(actual_TK)
        self.hits += int(hits_T.sum())
        self.exact += int((hits_T == self.top_k).sum())

    def add_loads(self, predicted_NE: np.ndarray, actual_NE: np.ndarray) -> None:
        """Compare predicted and actual loads iteration by iteration."""
        self.num_iterations += len(actual_NE)
        self.load_accuracy_sum += float(np.sum(metrics.load_accuracy(predicted_NE, actual_NE)))
        num_top = metrics.num_stragglers(actual_NE.shape[1])
        self.straggler_sum += float(np.sum(metrics.straggler_recall(predicted_NE, actual_NE, num_top)))

    def summary(self) -> dict[str, float] | None:
        """The four metrics under their JSON names; None when nothing was scored."""
        if self.num_tokens == 0 or self.num_iterations == 0:
            return None
        return {
            "token_recall": self.hits / (self.num_tokens * self.top_k),
            "exact_set": self.exact / self.num_tokens,
            "load_accuracy": self.load_accuracy_sum / self.num_iterations,
            "straggler_recall": self.straggler_sum / self.num_iterations,
        }


@dataclass(slots=True)
class PearsonSum:
    """Pearson's r over all (iteration, layer, expert) pairs of load shares seen (paper Fig. 12)."""

    num: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, predicted_NE: np.ndarray, actual_NE: np.ndarray) -> None:
        """Add the pairs of some iterations of one layer: loads, which count as shares of their iteration."""
        x = (predicted_NE / predicted_NE.sum(1, keepdims=True)).ravel()
        y = (actual_NE / actual_NE.sum(1, keepdims=True)).ravel()
        self.num += len(x)
        self.x += float(x.sum())
        self.y += float(y.sum())
        self.xx += float(x @ x)
        self.yy += float(y @ y)
        self.xy += float(x @ y)

    def r(self) -> float | None:
        """The coefficient, None when a side is constant."""
        if self.num < 2:
            return None
        covariance = self.xy - self.x * self.y / self.num
        variances = (self.xx - self.x**2 / self.num) * (self.yy - self.y**2 / self.num)
        return covariance / math.sqrt(variances) if variances > 0 else None
