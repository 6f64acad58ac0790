"""One rank's slots: background loads, cold starts, failures, and what is computed with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from moeless.engine.expert_pool import ExpertPool
from moeless.engine.residency import FAILED, NOT_READY, READY
from moeless.errors import CapacityError, CheckpointError
from moeless.models.expert_store import expert_bytes
from tests.engine.made_up import MadeUpExperts

torch.set_num_threads(1)


@pytest.fixture
def source() -> MadeUpExperts:
    return MadeUpExperts()


@pytest.fixture
def make(source: MadeUpExperts) -> Iterator[Callable[..., ExpertPool]]:
    pools: list[ExpertPool] = []

    def make_pool(num_slots: int, **options: object) -> ExpertPool:
        pools.append(ExpertPool(source, num_slots, **options))  # type: ignore[arg-type]
        return pools[-1]

    yield make_pool
    source.gate.set()
    for pool in pools:
        pool.close()
    assert not [t for t in threading.enumerate() if t.name == "expert-loader"]


def is_warm(pool: ExpertPool, source: MadeUpExperts, layer: int, expert: int) -> bool:
    slot = pool.weights(layer, expert)
    return slot is not None and all(torch.equal(slot[k], v) for k, v in source.weights(layer, expert).items())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_loads_run_in_the_background_in_order(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(3)
    source.gate.clear()
    for expert in (2, 0, 1):
        pool.request(1, expert)
    pool.request(1, 0)  # asked for already
    assert pool.states(1).tolist() == [NOT_READY] * 4
    source.gate.set()
    pool.wait_idle(10)
    assert source.reads == [(1, 2), (1, 0), (1, 1)]
    assert pool.states(1).tolist() == [READY, READY, READY, NOT_READY]
    assert all(is_warm(pool, source, 1, expert) for expert in range(3))
    assert pool.resident_bytes == 3 * expert_bytes(source)
    assert pool.stats.bytes_moved == pool.resident_bytes


def test_a_cold_start_does_not_wait_for_other_loads(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(4)
    source.gate.clear()
    pool.request(0, 0)
    pool.request(0, 1)
    until(lambda: bool(source.reads))
    pool.load_now(0, 1)  # still queued behind expert 0, which hangs
    assert is_warm(pool, source, 0, 1)
    assert pool.stats.cold_loads == 1
    source.gate.set()
    pool.wait_idle(10)
    assert source.reads == [(0, 0), (0, 1)]


def test_a_cold_start_waits_for_its_own_load(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(4)
    source.gate.clear()
    pool.request(0, 0)
    until(lambda: bool(source.reads))
    threading.Timer(0.1, source.gate.set).start()
    pool.load_now(0, 0)
    assert is_warm(pool, source, 0, 0)
    assert source.reads == [(0, 0)]
    assert pool.stats.cold_loads == 0


def test_a_load_dropped_under_way_gives_its_slot_back(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(1)
    source.gate.clear()
    pool.request(0, 0)
    until(lambda: bool(source.reads))
    pool.drop(0, 0)
    threading.Timer(0.1, source.gate.set).start()
    pool.load_now(0, 3)  # needs the slot that the loader still holds
    assert is_warm(pool, source, 0, 3)
    assert pool.weights(0, 0) is None
    assert pool.stats.wasted == 1


def test_dropped_without_a_token_is_wasted(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(2)
    for expert in (0, 1):
        pool.load_now(0, expert)
    pool.compute(0, torch.zeros(3, 8), [0, 3, 0, 0])
    pool.drop(0, 0)
    pool.drop(0, 1)
    assert pool.stats.wasted == 1
    assert pool.resident_bytes == 0


def test_a_failed_load_is_a_state_until_it_is_dropped(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(2)
    source.failing.add((0, 1))
    pool.request(0, 1)
    pool.request(0, 2)
    pool.wait_idle(10)
    assert pool.states(0).tolist() == [NOT_READY, FAILED, READY, NOT_READY]
    assert pool.stats.failures == 1
    assert "the disk is on fire" in pool.stats.last_error
    pool.drop(0, 1)
    source.failing.clear()
    pool.request(0, 1)
    pool.wait_idle(10)
    assert is_warm(pool, source, 0, 1)


def test_a_cold_start_that_cannot_be_read_is_an_error(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(2)
    source.failing.add((0, 1))
    with pytest.raises(CheckpointError, match="the disk is on fire"):
        pool.load_now(0, 1)
    assert source.reads == [(0, 1), (0, 1)]  # tried twice
    pool.load_now(0, 2)
    pool.load_now(0, 3)  # both slots are free


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_loader_is_replaced_and_counted(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(3)
    source.gate.clear()
    source.deadly.add((0, 1))
    for expert in (1, 2, 3):
        pool.request(0, expert)
    source.gate.set()
    until(lambda: pool.states(0)[3] == READY)
    assert pool.states(0).tolist() == [NOT_READY, FAILED, READY, READY]
    assert pool.stats.loader_restarts == 1
    assert "the loader thread died at expert 1 of MoE layer 0" in pool.stats.last_error


def test_budget_in_bytes() -> None:
    source = MadeUpExperts()
    size = expert_bytes(source)
    assert size == 4 * 3 * 8 * 12
    assert ExpertPool.slots_within(source, 5 * size + size // 2, "cpu") == 5
    assert ExpertPool.slots_within(source, 5 * size, "cuda") == 4  # one is for staging
    with pytest.raises(CapacityError, match="cannot hold one expert"):
        ExpertPool.slots_within(source, size - 1, "cpu")


def test_chunked_and_grouped_compute_are_the_plain_loop(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    rows = torch.randn(23, 8, generator=torch.Generator().manual_seed(0))
    counts = [9, 0, 13, 1]
    expected, start = [], 0
    for expert, count in enumerate(counts):
        expected.append(source.ffns[0](rows[start : start + count], source.weights(0, expert)))
        start += count
    for options in ({}, {"max_rows": 4}, {"grouped": True}):
        pool = make(4, **options)
        for expert in (0, 2, 3):  # neighbouring slots, so that they can be grouped
            pool.load_now(0, expert)
        actual = pool.compute(0, rows, counts)
        torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert pool.compute(0, rows[:0], [0, 0, 0, 0]).shape == (0, 8)
