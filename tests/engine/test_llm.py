"""`moeless.LLM` on one rank: the whole Python API over the bundled model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeless import LLM, SamplingParams
from moeless.errors import CapacityError, CheckpointError, UnsupportedModelError, UsageError
from tests.engine.serving import greedy_reference, near_tie
from tests.tiny import save_tiny_checkpoint

PROMPTS = ["Hello, who are you?", "Write a story about a cat", "Python list comprehension:"]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), kv_tokens=4_096, max_batch_tokens=64) as llm:
        yield llm


def test_greedy_text_is_that_of_generate(llm: LLM, demo_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    prompts = [list(o.prompt_token_ids) for o in outputs]
    assert prompts == [tokenizer(text)["input_ids"] for text in PROMPTS]
    for output, expected in zip(outputs, greedy_reference(model, prompts, 24), strict=True):
        made = list(output.outputs[0].token_ids)
        assert made == expected or near_tie(model, output.prompt_token_ids, made, expected)
        assert output.outputs[0].text == tokenizer.decode(made, skip_special_tokens=True)
        assert output.outputs[0].finish_reason == "length"


def test_one_prompt_may_be_text_or_ids_and_answers_come_in_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    one = llm.generate(PROMPTS[1], params)
    ids = llm.generate(list(one[0].prompt_token_ids), params)
    many = llm.generate(PROMPTS, [replace(params, max_tokens=n) for n in (3, 8, 2)])
    assert one[0].outputs == ids[0].outputs == many[1].outputs
    assert [len(o.outputs[0].token_ids) for o in many] == [3, 8, 2]
    assert llm.generate([], params) == []


def test_a_seed_gives_the_same_tokens_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, n=3)
    alone = llm.generate(PROMPTS[0], params)[0]
    beside = llm.generate(PROMPTS, [params, SamplingParams(temperature=1.5, max_tokens=30), params])[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in beside.outputs]
    assert [o.index for o in alone.outputs] == [0, 1, 2]
    assert len({o.token_ids for o in alone.outputs}) == 3
    free = SamplingParams(temperature=1.5, ignore_eos=True, max_tokens=64)
    unseeded = [llm.generate(PROMPTS[0], free)[0].outputs[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_the_callers_threads_stay_as_they_are(llm: LLM) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_stop_string_and_stop_token(llm: LLM) -> None:
    free = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    word = free.text.split()[4]
    ended = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=24, stop=[word]))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", word)
    assert ended.text == free.text[: free.text.index(word)]
    token = free.token_ids[3]
    ended = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token]))[0].outputs[0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)


def test_prompt_logprobs_score_the_prompt_alone_and_across_chunks(llm: LLM, demo_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    ids = torch.randint(5, 4_000, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    output = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 150
    with torch.inference_mode():
        reference = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position, scores in enumerate(output.prompt_logprobs[1:], start=1):
        assert scores is not None
        own = scores[ids[position]]
        assert own.logprob == pytest.approx(float(reference[position - 1, ids[position]]), abs=1e-4)
        assert set(reference[position - 1].topk(2).indices.tolist()) <= set(scores)


def test_chat_uses_the_template(llm: LLM, demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "user", "content": "Tell me a joke"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=6)
    answer = llm.chat(messages, params)[0]
    assert answer.prompt == text
    assert answer.outputs == llm.chat([messages, messages], params)[1].outputs
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.outputs == llm.generate([ids], params)[0].outputs


def test_defaults_are_the_checkpoints(llm: LLM) -> None:
    params = llm.default_params()
    assert (params.temperature, params.top_p) == (0.8, 0.95)


def test_statistics_count_what_was_done(llm: LLM) -> None:
    before = llm.statistics()
    llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    after = llm.statistics()
    assert after["source"] == "live"
    assert after["generation_tokens"] - before["generation_tokens"] == 10
    assert after["requests"] - before["requests"] == 2
    rank = after["ranks"][0]
    assert rank["kv_tokens_used"] == rank["running"] == rank["waiting"] == 0
    assert 0 < rank["kv_tokens_peak"] <= rank["kv_tokens"] == 4_096
    assert rank["kv_bytes"] == 4_096 * 12 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([[]], {}, "the prompt is empty"),
        ([[5, 4_096]], {}, "token id 4096, the vocabulary has 0 to 4095"),
        ([[5] * 2_040], {"max_tokens": 9}, "This model's maximum context length is 2048 tokens. However, the prompt"),
        ([[5]], {"logit_bias": {9_999: 1.0}}, "logit_bias has token id 9999"),
        ([[5]], {"stop_token_ids": [-1]}, "stop_token_ids has token id -1"),
    ],
)
def test_what_cannot_run_is_refused(llm: LLM, prompt: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt, SamplingParams(**params))
    assert llm.generate([[5]], SamplingParams(max_tokens=1))[0].outputs[0].finish_reason is not None


def test_sizes_that_cannot_work_are_refused(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="--max-model-len 2048 does not fit: with --kv-tokens 512"):
        LLM(str(demo_model), kv_tokens=512, max_model_len=2_048)
    with pytest.raises(UsageError, match="over the model's context length 2048"):
        LLM(str(demo_model), max_model_len=4_096)
    with pytest.raises(UsageError, match="--expert-slots 20 has no effect on one rank"):
        LLM(str(demo_model), expert_slots=20)
    with pytest.raises(CheckpointError, match="does not exist"):
        LLM(str(tmp_path / "nothing"))
    save_tiny_checkpoint("qwen3_next", tmp_path)
    with pytest.raises(UnsupportedModelError, match="qwen3_next models cannot be served"):
        LLM(str(tmp_path))


def test_a_checkpoint_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    save_tiny_checkpoint("mixtral", tmp_path)
    with LLM(str(tmp_path), kv_tokens=256) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0]
        assert len(output.token_ids) >= 1
        assert output.text == ""
        with pytest.raises(UsageError, match="has no tokenizer"):
            llm.generate("text")
        with pytest.raises(UsageError, match="stop strings need a tokenizer"):
            llm.generate([[5]], SamplingParams(stop="x"))
        with pytest.raises(UsageError, match="no chat template"):
            llm.chat([{"role": "user", "content": "x"}])


def test_import_is_light() -> None:
    code = "import sys, moeless; moeless.SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
