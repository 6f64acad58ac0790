from __future__ import annotations

import numpy as np
from cases import layers
from hypothesis import given, settings

from moeless.policy.placer import place, place_contiguous
from moeless.policy.scaler import scale
from moeless.policy.types import EpShape, check_placement, moves, num_replicas, static_placement


@given(layers())
@settings(max_examples=300, deadline=None)
def test_placements_are_legal_and_stable(case: tuple[list[int], EpShape]) -> None:
    loads, shape = case
    copies = scale(loads, shape.num_slots, shape.num_ranks, 0.2)
    placement = place(loads, copies, shape)
    check_placement(placement, shape)
    assert all(len(ranks) <= num for ranks, num in zip(placement, copies, strict=True))
    assert moves(placement, place(loads, copies, shape, alive=placement)) == ([], [])


@given(layers(), layers())
@settings(max_examples=200, deadline=None)
def test_unchanged_loads_move_nothing_after_a_change(
    first: tuple[list[int], EpShape], second: tuple[list[int], EpShape]
) -> None:
    (before, shape), (other, _) = first, second
    after = (other * len(before))[: len(before)]
    old = place(before, scale(before, shape.num_slots, shape.num_ranks, 0.2), shape)
    copies = scale(after, shape.num_slots, shape.num_ranks, 0.2)
    new = place(after, copies, shape, alive=old)
    check_placement(new, shape)
    assert moves(new, place(after, copies, shape, alive=new)) == ([], [])


def test_shortest_queue_by_hand() -> None:
    # 40 to rank 0, 30 to rank 1, 20 to rank 1 (30 against 40), 10 to rank 0 (40 against 50).
    assert place([40, 30, 20, 10], [1] * 4, EpShape(4, 2, 4)) == ((0,), (1,), (1,), (0,))


def test_warm_replicas_are_reused_while_their_rank_has_room() -> None:
    shape = EpShape(4, 2, 6)
    alive = ((1,), (0,), (0,), (1,))
    assert place([40, 30, 20, 10], [1] * 4, shape, alive) == alive
    # All alive on one rank: half of the load has to move off it.
    placement = place([40, 30, 20, 10], [1] * 4, EpShape(4, 2, 8), ((0,),) * 4)
    loads = np.zeros(2)
    for load, (rank,) in zip([40, 30, 20, 10], placement, strict=True):
        loads[rank] += load
    assert loads.tolist() == [50, 50]


def test_slots_are_respected_even_where_the_queue_is_short() -> None:
    placement = place([100, 1, 1, 1], [1] * 4, EpShape(4, 2, 4))
    assert placement == ((0,), (1,), (1,), (0,))


def test_more_ranks_than_experts() -> None:
    placement = place([10, 10], [2, 2], EpShape(2, 5, 5))
    check_placement(placement, EpShape(2, 5, 5))
    assert num_replicas(placement) == 4


def test_copies_prefer_nodes_that_have_the_expert_and_crossings_are_bounded() -> None:
    shape = EpShape(4, 4, 8, num_nodes=2)
    alive = static_placement(4, 4)
    free = place([90, 10, 10, 10], [3, 1, 1, 1], shape, alive)
    assert len(free[0]) == 3
    bounded = place([90, 10, 10, 10], [3, 1, 1, 1], shape, alive, max_cross_node=0)
    assert {shape.node_of(rank) for rank in bounded[0]} == {0}
    assert set(bounded[0]) <= set(free[0])
    check_placement(bounded, shape)


def test_contiguous_keeps_homes() -> None:
    shape = EpShape(6, 3, 9)
    placement = place_contiguous([1, 3, 1, 1, 2, 1], shape)
    check_placement(placement, shape)
    assert [home in ranks for (home,), ranks in zip(static_placement(6, 3), placement, strict=True)] == [True] * 6
    assert [len(ranks) for ranks in placement] == [1, 3, 1, 1, 2, 1]
