"""The allocator never hands a row out twice, the cache never exceeds its budget, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeless.engine.kv_cache import MIN_EXTENT, Extent, ExtentAllocator, KvCache, extent_size
from moeless.engine.packing import Span, pack
from moeless.errors import CapacityError


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(16, 700),
    actions=st.lists(st.tuples(st.sampled_from(["take", "grow", "free"]), st.integers(1, 300)), max_size=60),
)
def test_extents_are_disjoint_aligned_and_within_the_pool(num_rows: int, actions: list[tuple[str, int]]) -> None:
    allocator = ExtentAllocator(num_rows)
    held: list[Extent] = []
    for action, number in actions:
        if action == "take":
            extent = allocator.allocate(number)
            if extent is not None:
                assert extent.size == extent_size(number)
                held.append(extent)
        elif held:
            extent = held.pop(number % len(held))
            if action == "free":
                allocator.free(extent)
            else:
                held.append(allocator.extend(extent) or extent)
        rows = [row for e in held for row in range(e.start, e.start + e.size)]
        assert len(set(rows)) == len(rows) == allocator.num_used
        assert all(0 <= row < num_rows for row in rows)
        assert all(e.start % e.size == 0 for e in held)
    for extent in held:
        allocator.free(extent)
    assert allocator.num_used == 0
    assert allocator.allocate(allocator.max_extent) is not None, "freed neighbours did not join"


def test_equal_sequences_stand_side_by_side() -> None:
    cache = KvCache(1_024)
    for i in range(8):
        assert cache.reserve(i, 40)
    assert [cache.extent(i).start for i in range(8)] == [64 * i for i in range(8)]


def test_growth_keeps_what_was_there_and_clears_the_rest() -> None:
    cache = KvCache(128)
    assert cache.reserve(0, 16)
    assert cache.reserve(1, 16)
    spans = [Span(extent=cache.extent(i), first=0, num_new=16) for i in range(2)]
    order, batch = pack(spans, torch.device("cpu"))
    assert order == [0, 1]
    cache.start_step(batch)
    key = torch.randn(1, 2, 32, 4)
    cache.update(key, key, 0)
    cache.release(1)
    assert cache.reserve(0, 17)  # in place
    assert cache.extent(0) == Extent(32, 0)
    assert cache.reserve(2, 16)
    assert cache.reserve(0, 33)  # moved: what follows is taken
    assert cache.extent(0) == Extent(64, 64)
    group = pack([Span(extent=cache.extent(0), first=63, num_new=1)], torch.device("cpu"))[1].groups[0]
    stored, _ = cache.read(0, group)
    assert torch.equal(stored[0, :, :16], key[0, :, :16])
    assert not stored[0, :, 16:].any()


def test_no_room_changes_nothing() -> None:
    cache = KvCache(64)
    assert cache.reserve(0, 20)
    assert cache.reserve(1, 16)
    assert not cache.reserve(0, 33)
    assert cache.extent(0) == Extent(32, 0)
    assert cache.allocator.num_used == 48
    cache.release(0)
    cache.release(0)
    assert cache.allocator.num_used == 16


def test_memory_is_the_budget_times_the_bytes_of_a_token() -> None:
    cache = KvCache(100)
    assert cache.reserve(0, 5)
    cache.start_step(pack([Span(extent=cache.extent(0), first=0, num_new=5)], torch.device("cpu"))[1])
    cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 4), 0)
    assert cache.num_bytes == 96 * 2 * (8 + 4) * 4


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(CapacityError, match=f"at least {MIN_EXTENT} tokens, got 15"):
        KvCache(15)
