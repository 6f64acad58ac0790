"""The metrics against brute force from raw ids, and their edge cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeless import metrics


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    num_experts = draw(st.integers(2, 8))
    top_k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pick = lambda: np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)])  # noqa: E731
    return pick(), pick()


@given(routings())
def test_token_metrics_agree_with_sets(routing: tuple[np.ndarray, np.ndarray]) -> None:
    predicted, actual = routing
    sets = [(set(p), set(a)) for p, a in zip(predicted.tolist(), actual.tolist(), strict=True)]
    assert metrics.token_recall(predicted, actual) == pytest.approx(np.mean([len(p & a) / len(a) for p, a in sets]))
    assert metrics.exact_set_rate(predicted, actual) == pytest.approx(np.mean([p == a for p, a in sets]))


@given(
    hnp.arrays(np.int64, (3, 6), elements=st.integers(0, 50)), hnp.arrays(np.int64, (3, 6), elements=st.integers(0, 50))
)
def test_load_metrics_agree_row_by_row(predicted: np.ndarray, actual: np.ndarray) -> None:
    accuracy = metrics.load_accuracy(predicted, actual)
    recall = metrics.straggler_recall(predicted, actual, 2)
    assert isinstance(accuracy, np.ndarray)
    assert isinstance(recall, np.ndarray)
    for row in range(3):
        p, q = predicted[row].tolist(), actual[row].tolist()
        if sum(p) and sum(q):
            expected = sum(min(a / sum(p), b / sum(q)) for a, b in zip(p, q, strict=True))
        else:
            expected = float(sum(p) == sum(q))
        assert accuracy[row] == pytest.approx(expected)
        top = [set(sorted(range(6), key=lambda e, v=v: (-v[e], e))[:2]) for v in (p, q)]
        assert recall[row] == len(top[0] & top[1]) / 2


def test_balancedness_is_over_ranks_not_layers() -> None:
    layers_by_ranks = [[100, 200], [100, 200]]
    np.testing.assert_allclose(metrics.balancedness(layers_by_ranks), [0.75, 0.75])
    np.testing.assert_allclose(metrics.max_over_mean(layers_by_ranks), [4 / 3, 4 / 3])


def test_idle_layers_count_as_balanced() -> None:
    assert metrics.max_over_mean([0, 0, 0]) == 1
    assert metrics.coefficient_of_variation([0, 0, 0]) == 0
    assert metrics.balancedness([0, 0]) == 1


def test_pearson() -> None:
    assert metrics.pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert metrics.pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert metrics.pearson([1, 1, 1], [1, 2, 3]) is None
    x, y = np.random.default_rng(0).normal(size=(2, 100))
    assert metrics.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
