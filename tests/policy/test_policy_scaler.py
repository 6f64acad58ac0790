from __future__ import annotations

import numpy as np
from cases import layers
from hypothesis import given, settings
from hypothesis import strategies as st

from moeless.metrics import coefficient_of_variation
from moeless.policy.scaler import scale, scale_reference
from moeless.policy.types import EpShape


def cv(loads: list[int], copies: list[int]) -> float:
    """Coefficient of variation over replicas with load."""
    per_replica = np.repeat(np.array(loads) / copies, copies)
    return float(coefficient_of_variation(per_replica[per_replica > 0])) if any(loads) else 0.0


@given(layers(), st.sampled_from([0.0, 0.2, 0.6]), st.sampled_from([0.0, 1.0, 20.0]))
@settings(max_examples=300, deadline=None)
def test_equals_the_reference_and_respects_caps(
    case: tuple[list[int], EpShape], threshold: float, min_saving: float
) -> None:
    loads, shape = case
    copies = scale(loads, shape.num_slots, shape.num_ranks, threshold, min_saving)
    assert copies == scale_reference(loads, shape.num_slots, shape.num_ranks, threshold, min_saving)
    assert sum(copies) <= shape.num_slots
    assert all(1 <= num <= shape.num_ranks for num in copies)
    assert all(num == 1 for load, num in zip(loads, copies, strict=True) if load == 0)
    assert cv(loads, copies) <= cv(loads, [1] * len(loads)) + 1e-9


def test_balanced_loads_get_no_replicas() -> None:
    assert scale([10, 11, 9, 10], 100, 8, 0.2) == [1, 1, 1, 1]
    assert scale([0, 0, 0], 100, 8, 0.2) == [1, 1, 1]


def test_stops_at_the_threshold() -> None:
    copies = scale([80, 10, 10, 10], 100, 8, 0.2)
    assert copies == [6, 1, 1, 1]
    assert cv([80, 10, 10, 10], [5, 1, 1, 1]) > 0.2 >= cv([80, 10, 10, 10], copies)


def test_returns_the_best_plan_seen_where_division_makes_it_worse() -> None:
    # One of two equals divided is worse than none, both divided is better; four slots end at the first.
    loads = [30, 30, 12]
    assert cv(loads, [2, 1, 1]) > cv(loads, [1, 1, 1]) > cv(loads, [2, 2, 1])
    assert scale(loads, 4, 8, 0.0) == [1, 1, 1]
    assert scale(loads, 5, 8, 0.0) == [2, 2, 1]


def test_one_rank_means_one_replica() -> None:
    assert scale([1000, 1], 10, 1, 0.2) == [1, 1]


def test_one_expert_with_everything_is_one_replica_by_cv() -> None:
    # The deviation over a single loaded replica is 0: the paper's rule sees nothing to do.
    assert scale([1000, 0, 0], 10, 4, 0.2) == [1, 1, 1]


def test_stops_when_a_copy_saves_too_little() -> None:
    assert scale([100, 60, 50], 10, 8, 0.0, min_saving=41) == [1, 1, 1]
    assert scale([100, 60, 50], 4, 8, 0.0, min_saving=39) == [2, 1, 1]
