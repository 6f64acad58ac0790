"""The native trace: recorder, file, regrouping of tokens, and errors that name what is wrong."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.errors import DataError, UsageError
from moeless.trace.files import load_trace, save_trace
from moeless.trace.loads import LoadTrace, make_loads
from moeless.trace.recorder import Recorder
from moeless.trace.routes import count_experts, drop_sequences, make_routes
from tests.traces import skewed_ids, skewed_routes


def record(recorder: Recorder, iterations: list[np.ndarray], num_ranks: int = 2) -> None:
    """Record batches of ids [T, L, K]; tokens come from ranks in turn, request ids are token indices."""
    for ids in iterations:
        for layer in range(ids.shape[1]):
            counts = [np.bincount(ids[rank::num_ranks, layer].ravel(), minlength=16) for rank in range(num_ranks)]
            ready = np.eye(16, num_ranks, dtype=bool)
            recorder.record_layer(layer, counts, ready, predicted_E=np.sum(counts, 0) if layer else None)
        if recorder.token_capacity:
            recorder.record_tokens(ids, np.arange(len(ids)))
        recorder.end_iteration(phase="decode", num_tokens=len(ids), duration_s=0.5)


def make_recorder(capacity: int, token_capacity: int = 0) -> Recorder:
    return Recorder(
        num_layers=3, num_experts=16, num_ranks=2, capacity=capacity, top_k=2, token_capacity=token_capacity
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([0, 7, 20, 1000]))
def test_ring_keeps_the_newest_iterations(sizes: list[int], capacity: int, token_capacity: int) -> None:
    batches = [skewed_ids(size, seed=i) for i, size in enumerate(sizes)]
    recorder = make_recorder(capacity, token_capacity)
    record(recorder, batches)
    trace = recorder.snapshot("ring")
    kept = batches[-capacity:]
    if token_capacity:
        while kept and sum(map(len, kept)) > token_capacity:
            kept = kept[1:]
    if not kept:
        assert trace is None
        return
    assert trace is not None
    assert trace.num_iterations == len(kept)
    assert trace.metadata["num_overwritten"] == len(batches) - len(kept)
    for i, ids in enumerate(kept):
        np.testing.assert_array_equal(trace.counts_ILE[i], count_experts(ids, 16))
    if token_capacity:
        assert trace.ids_TLK is not None
        np.testing.assert_array_equal(trace.ids_TLK, np.concatenate(kept))


def test_recorder_memory_is_constant() -> None:
    recorder = make_recorder(capacity=64, token_capacity=128)
    batch = [skewed_ids(4)]
    record(recorder, batch * 10)
    tracemalloc.start()
    record(recorder, batch * 100)
    before, _ = tracemalloc.get_traced_memory()
    record(recorder, batch * 10_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000
    assert recorder.num_overwritten == 10_110 - 64


def test_file_round_trip(tmp_path: Path) -> None:
    recorder = make_recorder(capacity=8, token_capacity=100)
    record(recorder, [skewed_ids(5, seed=i) for i in range(4)])
    trace = recorder.snapshot("run", {"balancer": "static"})
    assert trace is not None
    save_trace(tmp_path / "run.safetensors", trace)
    again = load_trace(tmp_path / "run.safetensors")
    for name in LoadTrace.__dataclass_fields__:
        np.testing.assert_equal(getattr(again, name), getattr(trace, name))
    assert again.predicted_ILE is not None
    assert (again.predicted_ILE[:, 0] == -1).all()


def test_select_iterations_and_layers() -> None:
    recorder = make_recorder(capacity=8, token_capacity=100)
    record(recorder, [skewed_ids(5, seed=i) for i in range(4)])
    trace = recorder.snapshot("run")
    assert trace is not None
    assert trace.predicted_ILE is not None
    part = trace.select(num_iterations=3, layers=(0, 2))
    assert part.predicted_ILE is not None
    np.testing.assert_array_equal(part.counts_ILE, trace.counts_ILE[:3][:, [0, 2]])
    np.testing.assert_array_equal(part.predicted_ILE, trace.predicted_ILE[:3][:, [0, 2]])
    assert part.ids_TLK is None
    assert trace.select(num_iterations=99).num_iterations == 4


def test_tokens_regroup_by_request() -> None:
    recorder = make_recorder(capacity=8, token_capacity=100)
    batches = [skewed_ids(5, seed=i) for i in range(4)]
    record(recorder, batches)
    trace = recorder.snapshot("run")
    assert trace is not None
    routes = trace.to_routes()
    assert routes.phase == "decode"
    np.testing.assert_array_equal(routes.offsets, [0, 4, 8, 12, 16, 20])
    np.testing.assert_array_equal(routes.ids_TLK[4:8], [batch[1] for batch in batches])
    with pytest.raises(DataError, match="counts only"):
        make_loads(trace.counts_ILE, name="bare").to_routes()


@pytest.mark.parametrize("top_k", range(1, 9))
def test_counts_sum_to_tokens_times_k(top_k: int) -> None:
    ids = skewed_ids(50, top_k=top_k)
    assert (count_experts(ids, 16).sum(1) == 50 * top_k).all()
    assert make_routes(ids, name="x", phase="mixed", num_experts=16).top_k == top_k


def test_malformed_ids_are_named() -> None:
    ids = skewed_ids(5)
    ids[3, 1] = (7, 7)
    with pytest.raises(DataError, match=r"x: token 3, layer 1: expert 7 twice among \[7, 7\]"):
        make_routes(ids, name="x", phase="mixed")
    ids[3, 1] = (7, 16)
    with pytest.raises(DataError, match=r"token 3, layer 1: ids \[7, 16\] are not all in 0..15"):
        make_routes(ids, name="x", phase="mixed", num_experts=16)
    with pytest.raises(DataError, match="offsets must ascend from 0"):
        make_routes(skewed_ids(5), name="x", phase="mixed", offsets=np.array([0, 4]))
    with pytest.raises(DataError, match="integers"):
        make_routes(skewed_ids(5).astype(float), name="x", phase="mixed")


def test_malformed_counts_are_named() -> None:
    counts = np.ones((2, 3, 4))
    counts[1, 2, 3] = -1
    with pytest.raises(DataError, match=r"iteration 1, layer 2, expert 3: -1.* is not a whole count"):
        make_loads(counts, name="x")
    with pytest.raises(DataError, match="every count is zero"):
        make_loads(np.zeros((2, 3, 4)), name="x")


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "t.safetensors"
    path.write_bytes(b"not a trace")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        load_trace(path)
    save_file({"a": np.zeros(2)}, path)
    with pytest.raises(DataError, match="not a routing trace"):
        load_trace(path)
    save_file({"a": np.zeros(2)}, path, metadata={"format": "moeless.trace", "version": "9"})
    with pytest.raises(DataError, match="version '9', this program reads version 1"):
        load_trace(path)


def test_labels_select_and_drop_sequences() -> None:
    routes = skewed_routes(num_sequences=6, length=2)
    np.testing.assert_array_equal(routes.sequences_labelled("b"), [3, 4, 5])
    with pytest.raises(DataError, match="labelled 'zebra'; its labels: a, b"):
        routes.sequences_labelled("zebra")
    kept = drop_sequences(routes, np.array([True] * 3 + [False] * 3), "a test")
    assert kept.labels["dataset"] == ("b", "b", "b")
    np.testing.assert_array_equal(kept.ids_TLK, routes.ids_TLK[6:])
    with pytest.raises(UsageError, match="layer 3 is not in 'skewed', which has layers 0-2"):
        routes.select_layers((3,))
