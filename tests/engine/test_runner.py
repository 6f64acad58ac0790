"""The runner's edges: chunks that end just before a prompt does, logits that are not numbers, context lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeless.engine.runner import ModelRunner, context_length
from moeless.engine.scheduler import Scheduler
from tests.engine.serving import greedy, make_sequence
from tests.tiny import tiny_model


def test_only_sequences_that_got_a_token_are_given_back() -> None:
    runner = ModelRunner(tiny_model("mixtral"), 64)
    scheduler = Scheduler(runner.kv, max_batch_tokens=4, max_seqs=2)
    sequence = make_sequence(0, [5, 6, 7, 8, 9], greedy(2))
    scheduler.add(sequence)
    assert runner.step(scheduler.schedule()) == [], "one prompt token is left"
    assert (sequence.num_computed, sequence.num_output) == (4, 0)
    assert runner.step(scheduler.schedule()) == [sequence]
    assert (sequence.num_computed, sequence.num_output) == (5, 1)
    assert runner.num_tokens_run == 5


def test_logits_that_are_not_numbers_end_the_request_with_an_error() -> None:
    model: Any = tiny_model("mixtral")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    runner = ModelRunner(model, 64)
    scheduler = Scheduler(runner.kv, max_batch_tokens=8, max_seqs=2)
    sequence = make_sequence(0, [5, 6], greedy(4))
    scheduler.add(sequence)
    assert runner.step(scheduler.schedule()) == [sequence]
    assert sequence.finish_reason == "error"
    assert sequence.num_output == 0


def test_what_a_sequence_left_behind_does_not_reach_the_next_one() -> None:
    model = tiny_model("mixtral")
    runner = ModelRunner(model, 32)
    scheduler = Scheduler(runner.kv, max_batch_tokens=32, max_seqs=2)

    def run(number: int) -> list[int]:
        sequence = make_sequence(number, [5, 6, 7], greedy(8))
        scheduler.add(sequence)
        while sequence.finish_reason is None:
            runner.step(scheduler.schedule())
        scheduler.remove(sequence)
        return sequence.tokens

    clean = run(0)
    with torch.inference_mode():
        for pools in runner.kv._pools.values():
            for pool in pools:
                pool.fill_(float("nan"))  # as an overflow would leave it
    assert run(1) == clean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_position_embeddings": 4_096}, 4_096),
        ({"max_seq_len": 512}, 512),
        ({"max_position_embeddings": 4_096, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 4_096),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4_096},
            },
            4_096,
        ),
        (
            {
                "max_position_embeddings": 8_192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 2_048},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            2_048,
        ),
    ],
)
def test_context_ends_where_rope_would_depend_on_neighbours(values: dict[str, Any], expected: int) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**values))
    assert context_length(SimpleNamespace(config=config)) == expected  # type: ignore[arg-type]
