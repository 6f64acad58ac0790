"""Slots of all ranks: never more than there are, the last replica kept, the least recently used dropped first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeless.engine.keep_alive import KeepAlive
from moeless.engine.residency import FAILED, NOT_READY, READY, Eviction, Residency
from moeless.errors import CapacityError
from moeless.policy.types import Placement, placement_of, static_placement

NOTHING_BUSY = (0, np.zeros((4, 2), bool))


def full(slots: int, num_layers: int = 2) -> Residency:
    """Four experts on two ranks with their static placement loaded and ready."""
    residency = Residency(num_layers, 4, 2, slots)
    for layer in range(num_layers):
        residency.want(layer, static_placement(4, 2))
        for expert, rank in residency.missing(layer):
            assert residency.admit(layer, expert, rank, layer, NOTHING_BUSY) == (True, None)
        assert residency.confirm(layer, np.full((2, 4), READY)) == []
    return residency


def test_too_few_slots_for_one_layer_are_refused() -> None:
    with pytest.raises(CapacityError, match="2 expert slots a rank are too few: one layer needs 3"):
        Residency(2, 4, 2, 2)
    assert not Residency(2, 4, 2, 3).keeps_last
    assert Residency(2, 4, 2, 5).keeps_last


def test_nothing_moves_under_an_unchanged_plan() -> None:
    residency = full(6)
    assert residency.missing(0) == residency.missing(1) == []


def test_a_moved_expert_stays_until_it_is_ready_elsewhere() -> None:
    residency = full(5)
    residency.want(0, ((1,), (0,), (1,), (1,)))  # expert 0 moves from rank 0 to rank 1
    residency.want(1, ((0,), (1,), (1,), (1,)))  # expert 1 does too
    assert residency.missing(0) == [(0, 1)]
    assert residency.admit(0, 0, 1, 5, NOTHING_BUSY) == (True, None)  # the spare slot
    assert residency.admit(1, 1, 1, 6, NOTHING_BUSY) == (False, None)  # all others are the last of their kind
    assert residency.num_refused == 1
    residency.want(1, ((0,), (0,), (0,), (1,)))  # another turn: expert 2 moves to rank 0
    assert residency.admit(1, 2, 0, 7, NOTHING_BUSY) == (True, None)  # its spare slot
    residency.want(1, ((0,), (0,), (0,), (0,)))
    assert residency.admit(1, 3, 0, 8, NOTHING_BUSY) == (False, None)
    residency.confirm(0, np.full((2, 4), READY))
    assert residency.admit(1, 3, 0, 9, NOTHING_BUSY) == (True, Eviction(0, 0, 0))  # it lingered, and is elsewhere


def test_busy_replicas_are_not_evicted() -> None:
    residency = full(5)
    residency.want(0, ((1,), (0,), (1,), (1,)))
    residency.admit(0, 0, 1, 5, NOTHING_BUSY)
    residency.confirm(0, np.full((2, 4), READY))
    residency.want(1, ((0,), (0,), (0,), (0,)))
    assert residency.admit(1, 2, 0, 7, NOTHING_BUSY) == (True, None)
    busy = (0, np.eye(4, 2, dtype=bool))  # expert 0 on rank 0 is about to run
    assert residency.admit(1, 3, 0, 8, busy) == (False, None)


def test_a_further_replica_leaves_the_last_slot_to_experts_that_move() -> None:
    residency = full(5)
    residency.want(0, ((0, 1), (0,), (1,), (1,)))
    assert residency.admit(0, 0, 1, 5, NOTHING_BUSY) == (False, None)
    residency = full(6)
    residency.want(0, ((0, 1), (0,), (1,), (1,)))
    assert residency.admit(0, 0, 1, 5, NOTHING_BUSY) == (True, None)
    residency.want(1, ((1,), (1,), (1,), (1,)))
    assert residency.admit(1, 0, 1, 6, NOTHING_BUSY) == (True, None)
    residency.confirm(0, np.full((2, 4), READY))
    assert residency.admit(1, 1, 1, 7, NOTHING_BUSY) == (True, Eviction(0, 0, 1))  # it gives way, though wanted


def test_the_least_recently_used_goes_first_when_memory_is_short() -> None:
    residency = Residency(2, 4, 2, 3)
    for layer in (0, 1):
        residency.want(layer, static_placement(4, 2))
    for time, (layer, expert) in enumerate([(0, 0), (0, 1), (1, 0)]):
        assert residency.admit(layer, expert, 0, time, NOTHING_BUSY) == (True, None)
    residency.touch(0, np.array([[3, 0], [0, 0], [0, 0], [0, 0]]), 9)
    assert residency.admit(1, 1, 0, 10, NOTHING_BUSY, must=True) == (True, Eviction(0, 1, 0))
    assert residency.admit(0, 1, 0, 11, NOTHING_BUSY, must=True) == (True, Eviction(1, 0, 0))


def test_keep_alive_drops_what_lingers_without_a_token() -> None:
    residency = full(6)
    residency.want(0, ((0, 1), (0,), (1,), (1,)))
    residency.admit(0, 0, 1, 5, NOTHING_BUSY)
    residency.confirm(0, np.full((2, 4), READY))
    residency.want(0, static_placement(4, 2))
    assert residency.expire(100, keep_alive_us=100) == []
    residency.touch(0, np.array([[0, 1], [0, 0], [0, 0], [0, 0]]), 50)
    assert residency.expire(149, keep_alive_us=100) == []
    assert residency.expire(150, keep_alive_us=100) == [Eviction(0, 0, 1)]
    assert residency.expire(10_000, keep_alive_us=100) == []  # wanted replicas stay


def test_scaled_to_zero_an_expert_leaves_all_ranks_when_none_has_a_token_for_it() -> None:
    residency = full(6)
    residency.start_clock(1_000)
    residency.want(0, ((0, 1), (0,), (1,), (1,)))
    residency.admit(0, 0, 1, 1_000, NOTHING_BUSY)
    residency.confirm(0, np.full((2, 4), READY))
    residency.touch(0, np.array([[3, 0], [0, 0], [0, 0], [0, 0]]), 1_060)
    assert residency.next_expiry_us(100) is None  # plans want all there is
    assert residency.next_expiry_us(100, to_zero=True) == 1_100
    assert residency.expire(1_099, 100, to_zero=True) == []
    first = residency.expire(1_100, 100, to_zero=True)
    assert len(first) == 7  # all but expert 0 of layer 0, whose replica without a token is not idle either
    assert np.argwhere(residency.held_LEG).tolist() == [[0, 0, 0], [0, 0, 1]]
    assert not residency.ready_LEG[1].any()
    assert residency.next_expiry_us(100, to_zero=True) == 1_160
    assert residency.expire(1_160, 100, to_zero=True) == [Eviction(0, 0, 0), Eviction(0, 0, 1)]
    assert residency.num_held_G.tolist() == [0, 0]
    assert residency.next_expiry_us(100, to_zero=True) is None


def test_an_expert_that_sleeps_is_not_loaded_until_it_is_woken() -> None:
    residency = full(6)
    residency.want(0, ((0, 1), (0,), (1,), (1,)))
    residency.expire(1_000, 100, to_zero=True)
    assert residency.missing(0) == residency.missing(1) == []
    residency.want(0, ((0, 1), (1,), (1,), (0,)))  # another plan does not wake it
    assert residency.missing(0) == []
    residency.wake(0, 0)
    assert residency.missing(0) == [(0, 0), (0, 1)]
    residency.wake(0, np.array([False, True, False, True]))
    assert residency.missing(0) == [(0, 0), (0, 1), (1, 1), (3, 0)]
    assert residency.missing(1) == []


def test_what_lingers_alone_stays_unless_scaled_to_zero() -> None:
    residency = full(6)
    residency.want(0, ((1,), (0,), (1,), (1,)))  # expert 0 moves, but is not there yet
    assert residency.next_expiry_us(100) is None
    assert residency.expire(10_000, 100) == []
    residency.admit(0, 0, 1, 10_000, NOTHING_BUSY)
    residency.confirm(0, np.full((2, 4), READY))
    assert residency.next_expiry_us(100) == 100
    assert residency.expire(10_000, 100) == [Eviction(0, 0, 0)]


def test_keep_alive_looks_now_and_then_and_says_when_it_is_worth_it() -> None:
    residency = full(6)
    keep_alive = KeepAlive(residency, 0.0008, to_zero=True)
    assert keep_alive.look(5_000_000) == []  # the first look begins the time of what was held before
    assert keep_alive.rest_s(5_000_000) == pytest.approx(0.0009)
    residency.touch(1, np.array([[1, 0], [1, 0], [0, 0], [0, 0]]), 5_000_090)
    assert keep_alive.look(5_000_099) == []
    assert len(keep_alive.look(5_000_800)) == 6
    assert keep_alive.look(5_000_899) == []  # due since 9 us, but looked for a moment ago
    assert keep_alive.rest_s(5_000_810) == pytest.approx(0.00018)
    assert len(keep_alive.look(5_000_899, is_idle=True)) == 2
    assert keep_alive.rest_s(5_000_899) == math.inf


def test_a_failed_load_gives_its_slot_back_on_all_ranks() -> None:
    residency = full(6)
    residency.want(0, ((0, 1), (0,), (1,), (1,)))
    residency.admit(0, 0, 1, 5, NOTHING_BUSY)
    states = np.full((2, 4), READY)
    states[1, 0] = FAILED
    assert residency.confirm(0, states) == [(0, 1)]
    assert residency.num_held_G.tolist() == [4, 4]
    assert residency.missing(0) == [(0, 1)]  # to be tried again


def random_plan(rng: np.random.Generator, num_experts: int, num_ranks: int, slots: int) -> Placement:
    """A home each, and further replicas at random, within the slots of a rank."""
    room = [slots] * num_ranks
    hosts: list[set[int]] = []
    for _ in range(num_experts):
        rank = int(rng.choice(np.flatnonzero(np.array(room) > 0)))
        room[rank] -= 1
        hosts.append({rank})
    for expert, rank in rng.integers((num_experts, num_ranks), size=(num_experts, 2)).tolist():
        if room[rank] and rank not in hosts[expert]:
            room[rank] -= 1
            hosts[expert].add(rank)
    return placement_of(hosts)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 4), extra=st.integers(0, 3))
def test_every_plan_is_reached_in_the_end(seed: int, num_ranks: int, extra: int) -> None:
    """With two spare slots a rank, whatever was going on before, a plan that stays is carried out."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts = 3, 6
    slots = -(-num_experts // num_ranks) + extra
    residency = Residency(num_layers, num_experts, num_ranks, num_layers * slots + 2)
    for step in range(60):
        for layer in range(num_layers):
            if step < 20:
                residency.want(layer, random_plan(rng, num_experts, num_ranks, slots))
            for expert, rank in residency.missing(layer):
                residency.admit(layer, expert, rank, step, (layer, np.zeros((num_experts, num_ranks), bool)))
            arrived = rng.random((num_ranks, num_experts)) < (0.5 if step < 20 else 1)
            residency.confirm(layer, np.where(arrived, READY, NOT_READY))
    assert all(not residency.missing(layer) for layer in range(num_layers))
    assert (residency.num_held_G <= num_layers * slots + 2).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), slots=st.integers(4, 12), num_ranks=st.integers(1, 3))
def test_random_plans_scaled_to_zero(seed: int, slots: int, num_ranks: int) -> None:
    """Slots stay within bounds, nothing stays longer than it may, and no more is held than is awake."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts, keep_alive = 2, 4, 6
    slots = max(slots, -(-num_experts // num_ranks) + 1)
    residency = Residency(num_layers, num_experts, num_ranks, slots)
    for step in range(40):
        layer = int(rng.integers(num_layers))
        residency.want(layer, random_plan(rng, num_experts, num_ranks, slots))
        nothing = np.zeros((num_experts, num_ranks), bool)
        if rng.random() < 0.5:
            expert = int(rng.integers(num_experts))
            residency.wake(layer, expert)
            residency.admit(layer, expert, int(rng.integers(num_ranks)), step, (layer, nothing), must=True)
            residency.touch(layer, residency.held_LEG[layer] & (np.arange(num_experts) == expert)[:, None], step)
        for expert, rank in residency.missing(layer):
            residency.admit(layer, expert, rank, step, (layer, nothing))
        residency.confirm(layer, np.where(rng.random((num_ranks, num_experts)) < 0.7, READY, NOT_READY))
        residency.expire(step, keep_alive, to_zero=True)
        due = residency.next_expiry_us(keep_alive, to_zero=True)
        assert (due is None) == (not residency.held_LEG.any()) or due > step
        assert not (residency.held_LEG & residency.asleep_LE[:, :, None]).any()
        assert (residency.num_held_G <= slots).all()
        assert (residency.held_LEG.sum((0, 1)) == residency.num_held_G).all()
    while (due := residency.next_expiry_us(keep_alive, to_zero=True)) is not None:
        assert residency.expire(due, keep_alive, to_zero=True)
    assert not residency.held_LEG.any()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), spare=st.integers(1, 6), num_ranks=st.integers(1, 4))
def test_random_plans_stay_within_the_slots_and_lose_no_expert(seed: int, spare: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_experts = 3, 5
    slots = -(-num_layers * num_experts // num_ranks) + spare
    residency = Residency(num_layers, num_experts, num_ranks, slots)
    assert residency.keeps_last
    for step in range(30):
        layer = int(rng.integers(num_layers))
        hosts = [rng.permutation(num_ranks)[: rng.integers(1, num_ranks + 1)] for _ in range(num_experts)]
        residency.want(layer, tuple(tuple(sorted(map(int, ranks))) for ranks in hosts))
        busy = (layer, residency.held_LEG[layer].copy())
        had_ready = residency.ready_LEG.any(2)
        for expert, rank in residency.missing(layer):
            residency.admit(layer, expert, rank, step, busy)
        residency.expire(step, keep_alive_us=5)
        assert (residency.num_held_G <= slots).all()
        assert (residency.held_LEG.sum((0, 1)) == residency.num_held_G).all()
        assert (residency.ready_LEG.any(2) | ~had_ready).all()
        assert not (residency.ready_LEG & ~residency.held_LEG).any()
        residency.confirm(layer, rng.choice([0, READY, READY, FAILED], (num_ranks, num_experts)))
