from __future__ import annotations

import pytest
from cases import layers
from hypothesis import given, settings

from moeless.errors import CapacityError, UsageError
from moeless.policy.types import (
    EpShape,
    Placement,
    as_mask,
    check_placement,
    experts_on,
    from_mask,
    moves,
    num_replicas,
    placement_of,
    replicas,
    slots_used,
    static_placement,
)


def test_static_is_contiguous_and_fits() -> None:
    assert static_placement(8, 4) == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))
    assert static_placement(2, 4) == ((0,), (2,))


@given(layers())
@settings(max_examples=100, deadline=None)
def test_static_always_fits(case: tuple[list[int], EpShape]) -> None:
    _, shape = case
    check_placement(static_placement(shape.num_experts, shape.num_ranks), shape)


def test_views_agree() -> None:
    placement = placement_of([[2, 0, 2], [1], []])
    assert placement == ((0, 2), (1,), ())
    assert replicas(placement) == [(0, 0), (0, 2), (1, 1)]
    assert num_replicas(placement) == 3
    assert slots_used(placement, 3) == [1, 1, 1]
    assert experts_on(placement, 2) == [0]
    assert from_mask(as_mask(placement, 3)) == placement


def test_moves_are_what_differs() -> None:
    assert moves(((0, 1), (1,)), ((1, 2), (1,))) == ([(0, 2)], [(0, 0)])


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (((0,),), "a placement of 1 experts does not fit a layer of 2"),
        (((0,), ()), "expert 1 has no replica"),
        (((1, 0), (0,)), r"expert 0 has hosts \(1, 0\), not ascending"),
        (((0, 2), (0,)), r"not ascending ranks below 2"),
        (((0, 1), (0, 1)), "4 replicas exceed the layer's 3 slots"),
    ],
)
def test_illegal_placements_are_named(placement: Placement, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        check_placement(placement, EpShape(2, 2, 3))


def test_crowded_rank_is_named() -> None:
    with pytest.raises(CapacityError, match="rank 0 would hold 3 replicas but has 2 slots"):
        check_placement(((0,), (0,), (0,)), EpShape(3, 2, 3))


def test_sizes_are_checked() -> None:
    with pytest.raises(CapacityError, match="7 slots a layer cannot hold 8 experts; give each at least one slot"):
        EpShape(8, 4, 7)
    with pytest.raises(UsageError, match="num_ranks must be at least 1, got 0"):
        EpShape(8, 0, 8)
