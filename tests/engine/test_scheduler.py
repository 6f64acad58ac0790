"""Order, budget and preemption, over a cache that only counts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moeless.engine.kv_cache import KvCache
from moeless.engine.scheduler import Chunk, Scheduler
from moeless.engine.sequence import Sequence
from tests.engine.serving import greedy, make_sequence


def make(kv_tokens: int = 1_024, max_batch_tokens: int = 32, max_seqs: int = 8) -> Scheduler:
    return Scheduler(KvCache(kv_tokens), max_batch_tokens=max_batch_tokens, max_seqs=max_seqs)


def run(scheduler: Scheduler, chunks: list[Chunk]) -> list[Sequence]:
    """What a runner does to the sequences of a step."""
    ended = []
    for chunk in chunks:
        last = chunk.is_last
        chunk.sequence.num_computed += chunk.num_new
        if last:
            chunk.sequence.append(7)
            if chunk.sequence.finish_reason is not None:
                scheduler.remove(chunk.sequence)
                ended.append(chunk.sequence)
    return ended


def test_decoding_goes_before_prompts_which_are_cut_to_the_budget() -> None:
    scheduler = make(max_batch_tokens=10)
    first, second, third = (make_sequence(i, [1] * n, greedy(8)) for i, n in enumerate((4, 30, 3)))
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.add(second)
    scheduler.add(third)
    chunks = scheduler.schedule()
    assert [(c.sequence, c.num_new) for c in chunks] == [(first, 1), (second, 9)]
    run(scheduler, chunks)
    chunks = scheduler.schedule()
    assert [(c.sequence, c.num_new) for c in chunks] == [(first, 1), (second, 9)]


def test_first_come_first_served_even_where_a_later_one_would_fit() -> None:
    scheduler = make(kv_tokens=64)
    running, big, small = (make_sequence(i, [1] * n, greedy(4)) for i, n in enumerate((20, 40, 3)))
    for sequence in (running, big, small):
        scheduler.add(sequence)
    assert [c.sequence for c in scheduler.schedule()] == [running]
    assert scheduler.waiting == [big, small]


def test_the_youngest_gives_its_room_up_and_comes_back() -> None:
    scheduler = make(kv_tokens=96, max_batch_tokens=64)
    old, young = (make_sequence(i, [1] * 14, greedy(40)) for i in range(2))
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(20):
        run(scheduler, scheduler.schedule())
    assert scheduler.num_preemptions == 1
    assert scheduler.running == [old]
    assert young.num_computed == 0
    assert young.num_output > 0, "what was made is kept"
    made = list(young.tokens)
    ended: list[Sequence] = []
    while scheduler.has_work:
        ended += run(scheduler, scheduler.schedule())
    assert ended == [old, young]
    assert young.tokens[: len(made)] == made


def test_a_dropped_sequence_leaves_no_room_behind() -> None:
    scheduler = make()
    for i in range(3):
        scheduler.add(make_sequence(i, [1] * 20, greedy(4)))
    run(scheduler, scheduler.schedule())
    for sequence in [*scheduler.waiting, *scheduler.running]:
        scheduler.remove(sequence)
    assert not scheduler.has_work
    assert scheduler._kv.allocator.num_used == 0  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
    kv_tokens=st.integers(128, 400),
    max_batch_tokens=st.integers(4, 70),
    max_seqs=st.integers(1, 4),
)
def test_every_request_ends_within_every_budget(
    lengths: list[tuple[int, int]], kv_tokens: int, max_batch_tokens: int, max_seqs: int
) -> None:
    scheduler = make(kv_tokens, max_batch_tokens, max_seqs)
    sequences = [make_sequence(i, [1] * prompt, greedy(output)) for i, (prompt, output) in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(5_000):
        if not scheduler.has_work:
            break
        chunks = scheduler.schedule()
        assert chunks, "a step without progress"
        assert sum(c.num_new for c in chunks) <= max_batch_tokens
        assert len(scheduler.running) <= max_seqs
        assert len({id(c.sequence) for c in chunks}) == len(chunks)
        run(scheduler, chunks)
    assert all(s.num_output == s.max_tokens for s in sequences)
    assert scheduler._kv.allocator.num_used == 0  # type: ignore[attr-defined]
