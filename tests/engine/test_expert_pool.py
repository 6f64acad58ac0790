"""One rank's slots: background loads, cold starts, failures, and what is computed with them."""

from __future__ import annotations

import mmap
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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


def present_pages(pool: ExpertPool, slot: int) -> list[bool]:
    """Whether the kernel has memory behind each page that lies wholly in the rows of `slot`."""
    found: list[bool] = []
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for whole in pool._parameters.values():
            row = whole[slot]
            size = row.numel() * row.itemsize
            first, last = -(-row.data_ptr() // mmap.PAGESIZE), (row.data_ptr() + size) // mmap.PAGESIZE
            pagemap.seek(8 * first)
            entries = pagemap.read(8 * (last - first))
            found += [entries[i] >= 0x40 for i in range(7, len(entries), 8)]  # bits 63 and 62: in memory, swapped out
    assert len(found) > 15
    return found


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


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is given back under Linux only")
LARGE = {"hidden": 100, "ffn": 75}  # rows of 60,000 and 30,000 bytes: no slot ends at the end of a page


@needs_linux
def test_a_dropped_slot_gives_its_memory_back_and_leaves_its_neighbours() -> None:
    source = MadeUpExperts(**LARGE)
    pool = ExpertPool(source, 4)
    assert not any(present_pages(pool, 0) + present_pages(pool, 3))  # nothing is taken before it is used
    for expert in range(4):
        pool.load_now(0, expert)
    assert all(all(present_pages(pool, slot)) for slot in range(4))
    pool.drop(0, 1)  # for another expert, which takes its place at once
    assert all(present_pages(pool, 1))
    pool.load_now(1, 1)
    pool.drop(1, 1, give_back=True)
    pool.drop(0, 3, give_back=True)
    assert not any(present_pages(pool, 1) + present_pages(pool, 3))
    assert pool.resident_bytes == 2 * expert_bytes(source)
    assert is_warm(pool, source, 0, 0)
    assert is_warm(pool, source, 0, 2)
    pool.load_now(0, 3)
    assert is_warm(pool, source, 0, 3)
    rows = torch.randn(5, source.hidden)
    assert torch.equal(pool.compute(0, rows, [0, 0, 0, 5]), source.ffns[0](rows, source.weights(0, 3)))
    pool.close()


@needs_linux
def test_a_load_that_nobody_wants_any_more_leaves_no_memory_behind() -> None:
    source = MadeUpExperts(**LARGE)
    pool = ExpertPool(source, 2)
    source.gate.clear()
    pool.request(0, 0)
    until(lambda: bool(source.reads))
    pool.drop(0, 0, give_back=True)
    source.gate.set()
    pool.wait_idle(30)
    assert not any(present_pages(pool, 0))
    assert pool.resident_bytes == 0
    pool.close()


def test_a_slot_that_is_being_filled_is_not_touched(source: MadeUpExperts, make: Callable[..., ExpertPool]) -> None:
    pool = make(2)
    source.gate.clear()
    pool.request(0, 0)
    until(lambda: bool(source.reads))
    pool.drop(0, 0, give_back=True)
    pool.request(0, 0)  # wanted again before the loader is through
    source.gate.set()
    pool.wait_idle(30)
    assert source.reads == [(0, 0)]
    assert is_warm(pool, source, 0, 0)


@needs_linux
def test_drops_beside_loads_never_harm_an_expert() -> None:
    """The loader fills slots while others give their memory back; what is warm is right at every moment."""
    source = MadeUpExperts(**LARGE)
    pool = ExpertPool(source, 6)
    rng = random.Random(0)
    wanted: set[tuple[int, int]] = set()
    for _ in range(300):
        layer, expert = rng.randrange(2), rng.randrange(4)
        if (layer, expert) in wanted:
            wanted.discard((layer, expert))
            pool.drop(layer, expert, give_back=rng.random() < 0.8)
        elif len(wanted) < 5:  # a load that was dropped under way may still have the sixth
            wanted.add((layer, expert))
            pool.request(layer, expert)
        warm = [key for key in wanted if pool.weights(*key) is not None]
        assert all(is_warm(pool, source, *key) for key in warm)
    pool.wait_idle(30)
    assert all(is_warm(pool, source, *key) for key in wanted)
    assert pool.resident_bytes == len(wanted) * expert_bytes(source)
    pool.close()


@needs_linux
def test_a_pool_grows_around_its_experts() -> None:
    source = MadeUpExperts(**LARGE)
    pool = ExpertPool(source, 2, most_slots=4)
    for expert in (0, 1):
        pool.load_now(0, expert)
    addresses = [value.data_ptr() for value in (pool.weights(0, 0) or {}).values()]
    assert pool.grow(4)
    assert (pool.num_slots, pool.resident_bytes) == (4, 2 * expert_bytes(source))
    assert pool.grow(3)  # it has more already
    for expert in (2, 3):
        pool.load_now(0, expert)
    assert all(is_warm(pool, source, 0, expert) for expert in range(4))
    assert addresses == [value.data_ptr() for value in (pool.weights(0, 0) or {}).values()]
    assert not pool.grow(5)
    assert pool.num_slots == 4
    pool.close()
