"""Every accuracy and balance number the project prints, each defined once.

Legend: T tokens, K experts a token, E logical experts, G ranks, N iterations. Arrays are numpy; loads are token counts.
The paper does not define "accuracy" (section 4.1); these five readings are computed side by side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]


def token_hits(predicted_TK: Ints, actual_TK: Ints) -> NDArray[np.int64]:
    """For each token, how many of its actual experts were predicted: integers in 0..K, shape [T]."""
    hits: NDArray[np.int64] = (
        (predicted_TK[:, :, None] == actual_TK[:, None, :]).any(axis=1).sum(axis=1, dtype=np.int64)
    )
    return hits


def token_recall(predicted_TK: Ints, actual_TK: Ints) -> float:
    """|predicted and actual| / K, mean over tokens."""
    return float(token_hits(predicted_TK, actual_TK).mean() / actual_TK.shape[1])


def exact_set_rate(predicted_TK: Ints, actual_TK: Ints) -> float:
    """Share of tokens whose whole set of experts was predicted."""
    return float((token_hits(predicted_TK, actual_TK) == actual_TK.shape[1]).mean())


def load_accuracy(predicted: ArrayLike, actual: ArrayLike) -> Floats | float:
    """1 - half the L1 distance of the two load *shares* along the last axis: 1 is perfect, 0 is disjoint.

    Two all-zero loads agree; an all-zero load against any other scores 0.
    """
    p, q = np.asarray(predicted, float), np.asarray(actual, float)
    p_sum, q_sum = p.sum(-1, keepdims=True), q.sum(-1, keepdims=True)
    shares_p = np.divide(p, p_sum, out=np.zeros_like(p), where=p_sum > 0)
    shares_q = np.divide(q, q_sum, out=np.zeros_like(q), where=q_sum > 0)
    accuracy = 1 - 0.5 * np.abs(shares_p - shares_q).sum(-1)
    one_empty = (p_sum[..., 0] > 0) != (q_sum[..., 0] > 0)
    return _scalar_or_array(np.where(one_empty, 0.0, accuracy))


def straggler_recall(predicted: ArrayLike, actual: ArrayLike, num_top: int) -> Floats | float:
    """Share of the `num_top` most loaded experts found among the `num_top` predicted ones (ties: lowest index)."""
    p, q = np.asarray(predicted, float), np.asarray(actual, float)
    top_p = np.argsort(-p, axis=-1, kind="stable")[..., :num_top]
    top_q = np.argsort(-q, axis=-1, kind="stable")[..., :num_top]
    hits = (top_p[..., :, None] == top_q[..., None, :]).any(-1).sum(-1)
    return _scalar_or_array(hits / num_top)


def num_stragglers(num_experts: int) -> int:
    """How many experts count as stragglers: the top eighth, at least one."""
    return max(1, num_experts // 8)


def pearson(x: ArrayLike, y: ArrayLike) -> float | None:
    """Pearson's r over all pairs, None when either side is constant or there are fewer than two pairs."""
    a, b = np.asarray(x, float).ravel(), np.asarray(y, float).ravel()
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / np.sqrt((a @ a) * (b @ b)))


def coefficient_of_variation(loads: ArrayLike) -> Floats | float:
    """Population standard deviation over mean, along the last axis; 0 where all loads are zero."""
    x = np.asarray(loads, float)
    mean = x.mean(-1)
    return _scalar_or_array(np.divide(x.std(-1), mean, out=np.zeros_like(mean), where=mean > 0))


def max_over_mean(loads: ArrayLike) -> Floats | float:
    """Largest load over mean load along the last axis (1 is perfect balance); 1 where all loads are zero."""
    x = np.asarray(loads, float)
    mean = x.mean(-1)
    return _scalar_or_array(np.divide(x.max(-1), mean, out=np.ones_like(mean), where=mean > 0))


def balancedness(loads: ArrayLike) -> Floats | float:
    """Mean load over largest load along the *last* axis (vLLM's and SGLang's number); 1 where all loads are zero."""
    return _scalar_or_array(1 / np.asarray(max_over_mean(loads), float))


def _scalar_or_array(x: Floats) -> Floats | float:
    return float(x) if np.ndim(x) == 0 else x
