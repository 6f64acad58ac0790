"""What a layer's load is predicted to be before it runs, from a trace alone.

Legend: T tokens, L MoE layers, K experts a token, E experts, I iterations, d prediction distance.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError
from moeless.trace.loads import NO_PREDICTION, LoadTrace
from moeless.trace.routes import Routes, drop_sequences

Floats = NDArray[np.float64]

PREDICTORS = ("history", "recorded", "actual", "noisy", "conditional")


def predict_loads(
    name: str, trace: LoadTrace, *, distance: int, noise: float, seed: int, training: Routes | None
) -> Floats | None:
    """Predicted counts [I, L, E], a row of NaN where a layer has no prediction; None when nothing is predicted at all.

    Args:
        name: `history` predicts nothing (balancers use what they observed); `recorded` is what the trace holds;
            `actual` is the truth; `noisy` is the truth times U(1 - noise, 1 + noise) plus U(0, 0.3) of the mean load;
            `conditional` is the load of layer l - d times how often its experts are followed by each expert of layer l.
        training: routes, apart from those in the trace, that `conditional` learns from.

    Raises:
        DataError: `recorded` for a trace without predictions.
    """
    counts_ILE = trace.counts_ILE.astype(float)
    if name == "history":
        return None
    if name == "actual":
        return counts_ILE
    if name == "noisy":
        rng = np.random.default_rng(seed)
        factor = rng.uniform(1 - noise, 1 + noise, counts_ILE.shape)
        return counts_ILE * factor + rng.uniform(0, 0.3, counts_ILE.shape) * counts_ILE.mean(-1, keepdims=True)
    if name == "recorded":
        if trace.predicted_ILE is None:
            raise DataError(f"{trace.name}: holds no predicted counts, so --predictor recorded has nothing to replay")
        predicted = trace.predicted_ILE.astype(float)
        predicted[(trace.predicted_ILE == NO_PREDICTION).any(-1)] = np.nan
        return predicted
    assert training is not None
    return conditional_loads(counts_ILE, followers(training, distance), distance)


def followers(routes: Routes, distance: int) -> Floats:
    """Experts of layer l + d that follow one assignment to an expert of layer l, [L - d, E, E]; live rows sum to 1.

    Counted over tokens; an expert that no training token went to predicts the later layer's overall popularity.
    """
    num_pairs = max(0, routes.num_layers - distance)
    result = np.zeros((num_pairs, routes.num_experts, routes.num_experts))
    for layer in range(num_pairs):
        later_TE = _chosen(routes, layer + distance)
        together = (_chosen(routes, layer).T @ later_TE).astype(float)
        popularity = later_TE.sum(0, dtype=float)
        totals = together.sum(1, keepdims=True)
        result[layer] = np.where(totals > 0, together / np.maximum(totals, 1), popularity / popularity.sum())
    return result


def _chosen(routes: Routes, layer: int) -> NDArray[np.float32]:
    """1 where a token went to an expert [T, E]."""
    chosen = np.zeros((routes.num_tokens, routes.num_experts), np.float32)
    np.put_along_axis(chosen, routes.ids_TLK[:, layer].astype(np.int64), 1, axis=1)
    return chosen


def conditional_loads(counts_ILE: Floats, followers_LEE: Floats, distance: int) -> Floats:
    """Expected loads of the layers from `distance` on, NaN in the ones before."""
    predicted = np.full(counts_ILE.shape, np.nan)
    if distance < counts_ILE.shape[1]:
        predicted[:, distance:] = np.einsum(
            "ile,lef->ilf", counts_ILE[:, : counts_ILE.shape[1] - distance], followers_LEE
        )
    return predicted


def halve(routes: Routes) -> tuple[Routes, Routes]:
    """Every second sequence to learn from, the others to simulate on, so that no token lies on both sides.

    A single sequence is cut in the middle.

    Raises:
        DataError: fewer than two tokens.
    """
    num_sequences = len(routes.offsets) - 1
    if num_sequences > 1:
        odd = np.arange(num_sequences) % 2 == 1
        return drop_sequences(routes, odd, "held out"), drop_sequences(routes, ~odd, "kept to learn from")
    if routes.num_tokens < 2:
        raise DataError(f"{routes.name}: one token cannot be divided into a half to learn from and one to simulate on")
    half = routes.num_tokens // 2
    first = replace(routes, ids_TLK=routes.ids_TLK[:half], offsets=np.array([0, half]))
    rest = replace(routes, ids_TLK=routes.ids_TLK[half:], offsets=np.array([0, routes.num_tokens - half]))
    return first, rest
