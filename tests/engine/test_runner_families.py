"""Packed steps give exactly the tokens of transformers' `generate`, for every family that can be served."""

from __future__ import annotations

import copy

import pytest
import torch

from moeless.engine.request import SamplingParams
from moeless.engine.runner import ModelRunner
from moeless.engine.scheduler import Scheduler
from moeless.errors import UnsupportedModelError
from tests.engine.serving import greedy_reference, make_sequence, near_tie, random_prompts
from tests.tiny import FAMILIES, VOCAB, tiny_model

RECURRENT = ["qwen3_next", "jamba", "lfm2_moe", "granitemoehybrid", "minimax"]
SERVED = [family for family in FAMILIES if family not in RECURRENT]
OVERRIDES = {
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 8},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB},
}
NUM_TOKENS = 12
KV_TOKENS = 176


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", SERVED)
def test_chunks_preemption_and_late_joins_leave_greedy_tokens_as_they_are(family: str) -> None:
    model = tiny_model(family, **OVERRIDES.get(family, {}))
    prompts = random_prompts((5, 11, 40, 23, 7, 6, 9), VOCAB)
    expected = greedy_reference(model, prompts, NUM_TOKENS)
    original = copy.deepcopy(model)
    assert len({token for tokens in expected for token in tokens}) >= 10, "too uniform to tell right from wrong"

    runner = ModelRunner(model, KV_TOKENS)
    scheduler = Scheduler(runner.kv, max_batch_tokens=24, max_seqs=8)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    sequences = [make_sequence(i, prompt, greedy) for i, prompt in enumerate(prompts)]
    num_steps, mixed, chunked = 0, False, False
    for sequence in sequences[:4]:
        scheduler.add(sequence)
    while scheduler.has_work:
        chunks = scheduler.schedule()
        mixed |= len({c.num_new == 1 for c in chunks}) == 2
        chunked |= any(not c.is_last for c in chunks)
        for sequence in runner.step(chunks):
            if sequence.finish_reason is not None:
                scheduler.remove(sequence)
        num_steps += 1
        for sequence in sequences[4:] if num_steps == 4 else ():
            scheduler.add(sequence)

    assert mixed
    assert chunked
    assert scheduler.num_preemptions > 0
    assert runner.kv.allocator.num_used == 0
    assert runner.kv.peak_tokens <= KV_TOKENS
    for sequence, tokens in zip(sequences, expected, strict=True):
        made = sequence.tokens[len(sequence.prompt) :]
        assert made == tokens or near_tie(original, sequence.prompt, made, tokens)


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_families_are_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{family} .*recurrent"):
        ModelRunner(tiny_model(family), KV_TOKENS)
