"""Batches against what a scheduler must do: nobody lost, nobody early, sizes kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.bench.arrivals import Arrivals, poisson_arrivals, read_arrivals
from moeless.bench.workload import (
    closed_loop,
    continuous_batches,
    loads_of,
    prompt_batches,
    second_batches,
    switch_domain,
    token_chunks,
)
from moeless.errors import DataError
from tests.traces import real, skewed_routes


def arrivals_of(times: list[float], prompts: list[int], outputs: list[int]) -> Arrivals:
    return Arrivals(
        times_s_N=np.array(times, float),
        prompt_tokens_N=np.array(prompts),
        output_tokens_N=np.array(outputs),
        name="test",
    )


def test_closed_loop_keeps_all_streams_busy() -> None:
    routes = skewed_routes()
    batches = closed_loop(routes, 8, 100, seed=3)
    assert [len(tokens) for tokens in batches.tokens] == [8] * 100
    streams = np.stack(batches.tokens)  # [I, B]
    sequence = np.searchsorted(routes.offsets, streams, side="right") - 1
    same = sequence[1:] == sequence[:-1]
    assert (np.diff(streams, axis=0)[same] >= 1).mean() > 0.95  # one sequence can follow itself
    fresh = ~same
    np.testing.assert_array_equal(streams[1:][fresh], routes.offsets[sequence[1:][fresh]])
    np.testing.assert_array_equal(np.stack(closed_loop(routes, 8, 100, seed=3).tokens), streams)


def test_prompts_and_chunks_go_round() -> None:
    routes = skewed_routes(num_sequences=4, length=5)
    batches = prompt_batches(routes, 3, 4)
    np.testing.assert_array_equal(batches.tokens[1], [*range(15, 20), *range(10)])
    chunks = token_chunks(routes, 8, 3)
    np.testing.assert_array_equal(chunks.tokens, [np.arange(8), np.arange(8, 16), np.arange(8)])
    with pytest.raises(DataError, match="has 20 tokens, fewer than one iteration of 21"):
        token_chunks(routes, 21, 1)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=12),
    st.integers(1, 40),
)
def test_continuous_batching_serves_every_token_once(requests: list[tuple[float, int, int]], max_tokens: int) -> None:
    times, prompts, outputs = map(list, zip(*sorted(requests), strict=True))
    arrivals = arrivals_of(times, prompts, outputs)
    batches = continuous_batches(
        skewed_routes(phase="mixed"), arrivals, num_iterations=10_000, iteration_s=0.1, max_tokens=max_tokens, seed=0
    )
    sizes = [len(tokens) for tokens in batches.tokens]
    assert sum(sizes) == sum(prompts) + sum(outputs)
    assert all(0 < size <= max_tokens for size in sizes)


def test_continuous_batching_by_hand() -> None:
    arrivals = arrivals_of([0, 0.15], [6, 2], [2, 1])
    routes = skewed_routes(phase="mixed")
    batches = continuous_batches(routes, arrivals, num_iterations=99, iteration_s=0.1, max_tokens=4, seed=0)
    # 4 of 6 prompt tokens; the last 2; one decoding + 2 prompt tokens; one decoding each
    assert [len(tokens) for tokens in batches.tokens] == [4, 2, 3, 2]
    assert batches.phases == ["prefill", "prefill", "mixed", "decode"]
    prompt = np.concatenate(batches.tokens[:2])
    assert (np.diff(prompt) == 1).all()


def test_one_second_batches_by_hand() -> None:
    arrivals = arrivals_of([0, 0.9, 1.1], [3, 4, 5], [1, 3, 0])
    batches = second_batches(skewed_routes(phase="mixed"), arrivals, num_iterations=99, seed=0)
    assert [len(tokens) for tokens in batches.tokens] == [7, 2, 1, 1, 5]
    assert batches.phases == ["prefill", "decode", "decode", "decode", "prefill"]


def test_routes_of_one_phase_stand_for_that_phase_alone() -> None:
    arrivals = arrivals_of([0, 0.5], [3, 4], [2, 2])
    assert sum(map(len, second_batches(skewed_routes(), arrivals, num_iterations=9, seed=0).tokens)) == 4
    prefill = skewed_routes(phase="prefill")
    assert [len(t) for t in second_batches(prefill, arrivals, num_iterations=9, seed=0).tokens] == [7]


def test_domain_switch_changes_the_popular_experts() -> None:
    first, second = switch_domain(skewed_routes(), "a", "b")
    loads = loads_of([(r, closed_loop(r, 32, 20, seed=0)) for r in (first, second)], "switch")
    assert loads.num_iterations == 40
    assert (loads.counts_ILE.sum(2) == 32 * 2).all()
    half = loads.counts_ILE[:, 0, :8].sum(1)
    assert half[:20].min() > half[20:].max()


def test_poisson_rate() -> None:
    arrivals = poisson_arrivals(4.0, np.array([3, 5]), 4_000, seed=1)
    assert arrivals.times_s_N[-1] == pytest.approx(1_000, rel=0.1)
    assert set(arrivals.prompt_tokens_N) == {3, 5}


def test_azure_rows_and_their_errors(tmp_path: Path) -> None:
    path, head = tmp_path / "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    path.write_text(head + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    arrivals = read_arrivals(path)
    np.testing.assert_allclose(arrivals.times_s_N, [0, 4.314579])
    assert arrivals.output_tokens_N.tolist() == [44, 109]
    for text, reason in {
        "TIMESTAMP\n": "line 1: no column ContextTokens, GeneratedTokens",
        head + "yesterday,1,2\n": "line 2: TIMESTAMP 'yesterday' is no date",
        head + "2023-11-16 18:15:46,1,x\n": "line 2: GeneratedTokens must be a whole number, got 'x'",
        head: "no requests",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            read_arrivals(path)


def test_mooncake_rows_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 3000, "input_length": 7, "output_length": 2}\n\n')
    assert read_arrivals(path).prompt_tokens_N.tolist() == [7]
    assert read_arrivals(path).blocks == ()
    late = '{"timestamp": 9, "input_length": 600, "output_length": 2, "hash_ids": [4, 9]}\n'
    early = '{"timestamp": 5, "input_length": 7, "output_length": 2, "hash_ids": [4]}\n'
    path.write_text(late + early)
    assert read_arrivals(path).blocks == ((4,), (4, 9))  # in order of arrival, as the rest
    for wrong in ("7", '["x"]', "[-1]", "[true]"):
        path.write_text(late.replace("[4, 9]", wrong))
        with pytest.raises(DataError, match="line 1: hash_ids must be a list of whole numbers"):
            read_arrivals(path)
    path.write_text('{"timestamp": 3000}\n')
    with pytest.raises(DataError, match="line 1: needs timestamp, input_length and output_length"):
        read_arrivals(path)
    with pytest.raises(DataError, match="no arrivals file"):
        read_arrivals(Path(__file__))


def test_real_arrivals() -> None:
    azure = read_arrivals(real("arrivals/azure_llm_2023_conv.csv"))
    assert len(azure) == 19_366
    assert 3_000 < azure.times_s_N[-1] < 4_000
    mooncake = read_arrivals(real("arrivals/mooncake_conversation_trace.jsonl"))
    assert len(mooncake) == len(mooncake.blocks) == 12_031
