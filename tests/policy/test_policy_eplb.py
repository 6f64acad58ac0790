from __future__ import annotations

import numpy as np
import pytest
from cases import layers
from hypothesis import given, settings

from moeless.errors import UsageError
from moeless.policy.eplb import eplb
from moeless.policy.types import EpShape, slots_used

# The two layers of the example in EPLB's README; the hierarchical rows are its printed output.
LOADS = (
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
)
HIERARCHICAL = (
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
)
GLOBAL = (
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
)


@pytest.mark.parametrize("layer", [0, 1])
def test_golden_vectors(layer: int) -> None:
    loads = np.array(LOADS[layer])
    assert eplb(loads, EpShape(12, 8, 16, num_groups=4, num_nodes=2)).expert_P.tolist() == HIERARCHICAL[layer]
    assert eplb(loads, EpShape(12, 8, 16)).expert_P.tolist() == GLOBAL[layer]


@pytest.mark.parametrize("layer", [0, 1])
def test_groups_that_do_not_divide_over_nodes_fall_back_to_the_global_policy(layer: int) -> None:
    shape = EpShape(12, 8, 16, num_groups=3, num_nodes=2)
    assert eplb(np.array(LOADS[layer]), shape).expert_P.tolist() == GLOBAL[layer]


def test_hierarchical_keeps_groups_on_one_node() -> None:
    shape = EpShape(12, 8, 16, num_groups=4, num_nodes=2)
    for expert, ranks in enumerate(eplb(np.array(LOADS[0]), shape).placement):
        assert len({shape.node_of(rank) for rank in ranks}) == 1, expert


def test_duplicates_on_a_rank_are_counted() -> None:
    plan = eplb(np.array([100, 1, 1, 1]), EpShape(4, 2, 8))
    assert plan.expert_P.tolist() == [0, 0, 0, 3, 0, 0, 1, 2]
    assert plan.num_duplicates == 3
    assert plan.placement == ((0, 1), (1,), (1,), (0,))
    assert plan.multiplicity_EG.tolist() == [[3, 2], [0, 1], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (EpShape(12, 8, 17), r"eplb cannot divide 17 slots evenly over 8 ranks"),
        (EpShape(12, 8, 16, num_groups=5), r"eplb cannot divide 12 experts evenly over 5 groups"),
    ],
)
def test_illegal_sizes_are_named(shape: EpShape, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        eplb(np.ones(12), shape)


def test_ranks_that_do_not_divide_over_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="8 ranks cannot be divided evenly over 3 nodes"):
        EpShape(12, 8, 16, num_nodes=3)


@given(layers())
@settings(max_examples=150, deadline=None)
def test_everything_is_derived_from_the_slots(case: tuple[list[int], EpShape]) -> None:
    loads, any_shape = case
    shape = EpShape(any_shape.num_experts, any_shape.num_ranks, any_shape.slots_per_rank * any_shape.num_ranks)
    plan = eplb(np.array(loads), shape)
    assert len(plan.expert_P) == shape.num_slots
    assert (plan.copies_E >= 1).all()
    assert (plan.multiplicity_EG.sum(1) == plan.copies_E).all()
    assert (plan.multiplicity_EG.sum(0) == shape.slots_per_rank).all()
    assert sum(slots_used(plan.placement, shape.num_ranks)) == shape.num_slots - plan.num_duplicates
