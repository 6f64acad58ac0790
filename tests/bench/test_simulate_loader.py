"""Replicas over time: nothing is ever unserved, room is kept, and copies take the time they take."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeless.bench.simulate_loader import CopyEngines, usable_replicas
from moeless.policy.types import LayerPlan, Placement, moves, num_replicas, slots_used, static_placement


def engines(start: Placement, num_ranks: int, slots_per_rank: int, copy_us: float = 10.0) -> CopyEngines:
    return CopyEngines([start], wanted=[start], num_ranks=num_ranks, copy_us=copy_us, slots_per_rank=slots_per_rank)


def want(copies: CopyEngines, placement: Placement, now_us: float) -> None:
    """Apply a plan that asks for `placement`."""
    needed, dropped = moves(copies.layers[0].wanted, placement)
    copies.apply(0, LayerPlan(placement, tuple(needed), tuple(dropped)), now_us)


def random_placement(rng: np.random.Generator, num_experts: int, num_ranks: int, slots_per_rank: int) -> Placement:
    """Any placement within the slots: a random home for all, then replicas where there is room."""
    room = [slots_per_rank] * num_ranks
    hosts: list[set[int]] = [set() for _ in range(num_experts)]
    wanted = [*range(num_experts), *rng.integers(0, num_experts, num_ranks * slots_per_rank - num_experts)]
    for expert in wanted:
        free = [g for g in range(num_ranks) if room[g] and g not in hosts[expert]]
        if free:
            rank = int(rng.choice(free))
            hosts[expert].add(rank)
            room[rank] -= 1
    return tuple(tuple(sorted(ranks)) for ranks in hosts)


def test_a_copy_is_late_until_it_is_done() -> None:
    copies = engines(((0,), (1,)), num_ranks=2, slots_per_rank=2)
    want(copies, ((0, 1), (0, 1)), now_us=5)
    copies.advance(14.9)
    assert copies.layers[0].usable == ((0,), (1,))
    assert copies.layers[0].in_flight == {(0, 1), (1, 0)}
    copies.advance(15)
    assert copies.layers[0].usable == ((0, 1), (0, 1))
    assert copies.num_copies == 2
    assert copies.num_resident == 4


def test_copies_of_a_rank_queue_and_those_no_longer_wanted_are_forgotten() -> None:
    copies = engines(((0,), (0,), (0,)), num_ranks=2, slots_per_rank=3)
    want(copies, ((0, 1), (0, 1), (0, 1)), now_us=0)
    copies.advance(10)
    assert copies.layers[0].usable == ((0, 1), (0,), (0,))
    want(copies, ((0, 1), (0,), (0,)), now_us=12)
    copies.advance(1e9)
    assert copies.num_copies == 2  # the second was under way, the third never started
    assert copies.layers[0].warm_placement == ((0, 1), (0, 1), (0,))


def test_a_swap_serves_throughout() -> None:
    copies = engines(((0,), (1,)), num_ranks=2, slots_per_rank=1)
    want(copies, ((1,), (0,)), now_us=0)
    for now_us in (0, 5):
        copies.advance(now_us)
        assert copies.layers[0].usable == ((0,), (1,))
    copies.advance(10)
    assert copies.layers[0].usable == ((1,), (0,))
    assert copies.layers[0].used == [1, 1]
    assert copies.peak_slots_per_rank == 2


def test_an_unused_copy_that_is_dropped_is_wasted() -> None:
    copies = engines(((0,), (1,), (1,)), num_ranks=2, slots_per_rank=2)
    want(copies, ((0, 1), (0,), (1,)), now_us=0)
    copies.advance(10)
    want(copies, ((0,), (0, 1), (1,)), now_us=10)
    copies.advance(30)
    assert copies.num_wasted == 1


def test_usable_replicas() -> None:
    wanted: Placement = ((0, 1), (2,), (0,))
    assert usable_replicas(wanted, ((0, 1, 2), (2, 3), (0,))) == ((0, 1), (2,), (0,))
    assert usable_replicas(wanted, ((0, 2), (3, 4), ())) == ((0,), (3,), ())


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 10), st.integers(0, 3))
def test_any_plans_at_any_times(seed: int, num_ranks: int, num_experts: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    slots = math.ceil(num_experts / num_ranks) + spare
    copies = engines(static_placement(num_experts, num_ranks), num_ranks, slots)
    now_us, placement = 0.0, copies.layers[0].wanted
    for _ in range(8):
        placement = random_placement(rng, num_experts, num_ranks, slots)
        want(copies, placement, now_us)
        now_us += float(rng.exponential(20))
        copies.advance(now_us)
        state = copies.layers[0]
        assert all(state.usable)  # every expert can be served
        assert all(set(ranks) <= set(warm) for ranks, warm in zip(state.usable, state.warm_placement, strict=True))
        assert state.used == slots_used(state.warm_placement, num_ranks)
        assert copies.num_resident == num_replicas(state.warm_placement)
    copies.advance(now_us + 1e9)
    state = copies.layers[0]
    assert state.usable == placement
    assert max(state.used) <= slots
    assert not state.queued
    assert not state.in_flight
