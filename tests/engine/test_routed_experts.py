"""Experts told to a client are those of transformers' own routers, however a completion was computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moeless import LLM, SamplingParams
from moeless.engine.ep import LocalGroup
from moeless.engine.facts import ModelFacts
from moeless.engine.routed_experts import MAX_BYTES, StepIds, from_npy, id_type, to_npy
from moeless.engine.submission import check_routed_experts
from moeless.errors import UsageError
from tests.engine.ranks import RankPool
from tests.engine.routed import check_routes, reference_routes, routed, run_routed
from tests.engine.serving import greedy, random_prompts
from tests.tiny import VOCAB, save_tiny_checkpoint

LENGTHS = (5, 70, 12, 50, 8)
NUM_LAYERS, TOP_K = 12, 2


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


def run_on(ranks: RankPool, size: int, **arguments: Any) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    results = [run_routed(LocalGroup(), **arguments)] if size == 1 else ranks.run(run_routed, size, **arguments)
    return {i: output for done, _ in results for i, output in done.items()}, [numbers for _, numbers in results]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (1, {"expert_memory_gb": 0.02}),
        (1, {"kv_tokens": 144}),
        (2, {}),
        (2, {"kv_tokens": 192}),
        (2, {"balancer": "eplb"}),
    ],
    ids=["whole", "from-slots", "whole-preempted", "two-ranks", "two-ranks-preempted", "eplb"],
)
def test_routes_are_those_of_transformers(
    ranks: RankPool, demo: PreTrainedModel, demo_model: Path, size: int, options: dict[str, Any]
) -> None:
    """Prompts are longer than a step has room for, so that they are computed in parts beside others that decode."""
    prompts = random_prompts(LENGTHS, 4096) + random_prompts((30, 40, 45), 4096, seed=2)
    params = [routed(greedy(16, ignore_eos=True))] * len(prompts)
    params[2] = greedy(16, ignore_eos=True)
    config = {"model": str(demo_model), "max_batch_tokens": 24, "max_seqs": 8, "kv_tokens": 1_024, **options}
    outputs, numbers = run_on(ranks, size, config=config, prompts=prompts, params=params)
    for i, prompt in enumerate(prompts):
        if i == 2:
            assert outputs[i].routed_experts is None
        else:
            check_routes(demo, [*prompt, *outputs[i].token_ids[:-1]], outputs[i].routed_experts)
    assert any(rank["preemptions"] for rank in numbers) == ("kv_tokens" in options)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama4_text", "dbrx", "deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_families(ranks: RankPool, tmp_path: Path, family: str, size: int) -> None:
    model = save_tiny_checkpoint(family, tmp_path)
    prompts = random_prompts((7, 20, 11), VOCAB)
    config = {"model": str(tmp_path), "max_batch_tokens": 16, "kv_tokens": 256}
    params = [routed(greedy(6, ignore_eos=True))] * 3
    outputs, _ = run_on(ranks, size, config=config, prompts=prompts, params=params)
    for i, prompt in enumerate(prompts):
        ids_TLK, _ = reference_routes(model, [*prompt, *outputs[i].token_ids[:-1]])
        assert np.array_equal(np.sort(outputs[i].routed_experts), np.sort(ids_TLK))


def test_the_python_api(demo: PreTrainedModel, demo_model: Path) -> None:
    prompt = random_prompts((9,), 4096)[0]
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, ignore_eos=True, return_routed_experts=True)
    with LLM(str(demo_model), kv_tokens=512) as llm:
        outputs = llm.generate([prompt], params)[0].outputs
        assert len({output.token_ids for output in outputs}) == 3
        for output in outputs:
            check_routes(demo, [*prompt, *output.token_ids[:-1]], output.routed_experts)
        scored = llm.generate([prompt], routed(greedy(0)))[0].outputs[0]
        check_routes(demo, prompt, scored.routed_experts)
        plain = llm.generate([prompt], replace(params, return_routed_experts=False))[0].outputs
        assert [output.routed_experts for output in plain] == [None] * 3
        assert [output.token_ids for output in plain] == [output.token_ids for output in outputs]


def test_ranks_send_routes_too(demo: PreTrainedModel, demo_model: Path) -> None:
    prompts = random_prompts((9, 14, 3), 4096)
    with LLM(str(demo_model), ep=2, kv_tokens=512) as llm:
        for output in llm.generate(prompts, routed(greedy(4, ignore_eos=True))):
            done = output.outputs[0]
            check_routes(demo, [*output.prompt_token_ids, *done.token_ids[:-1]], done.routed_experts)


def test_what_is_too_large_is_refused() -> None:
    facts = ModelFacts(
        max_model_len=100_000,
        vocab_size=9,
        eos_ids=(),
        sampling_defaults={},
        num_moe_layers=64,
        num_experts=257,
        top_k=8,
    )
    most = MAX_BYTES // (64 * 8 * 2)  # ids over 255 take two bytes
    params = SamplingParams(max_tokens=most - 9, return_routed_experts=True)
    check_routed_experts([[5] * 10], params, facts)
    for prompts, other in (([[5] * 11], params), ([[5] * 10], replace(params, n=2)), ([[5] * 10, [5]], params)):
        with pytest.raises(UsageError, match="return_routed_experts would take up to"):
            check_routed_experts(prompts, other, facts)
    with pytest.raises(UsageError, match="tokens x 64 layers x 8 experts"):
        check_routed_experts([[5]], replace(params, max_tokens=None), facts)
    check_routed_experts([[5]], SamplingParams(max_tokens=None), facts)
    with pytest.raises(UsageError, match="does not say how many experts"):
        check_routed_experts([[5]], params, replace(facts, top_k=None))


def test_ids_are_kept_only_between_start_and_stop() -> None:
    step, ids = StepIds(), torch.zeros(1, 2)
    step.note(ids)
    step.start(wanted=True)
    step.note(ids)
    assert step.stop() == [ids]
    step.note(ids)
    step.start(wanted=True)
    assert step.stop() == []


@pytest.mark.parametrize(("num_experts", "name"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65_537, "uint32")])
def test_the_smallest_type_that_holds_the_ids(num_experts: int, name: str) -> None:
    kind = id_type(num_experts)
    assert kind == np.dtype(name)
    routes_TLK = np.full((3, 2, 1), num_experts - 1, kind)
    back_TLK = from_npy(to_npy(routes_TLK))
    assert back_TLK.dtype == kind
    assert np.array_equal(back_TLK, routes_TLK)


def test_nothing_is_kept_after_a_step_that_broke_off() -> None:
    step_ids = StepIds()
    step_ids.start(wanted=True)
    step_ids.note(torch.zeros(1, 1))
    step_ids.start(wanted=False)
    step_ids.note(torch.zeros(1, 1))
    assert step_ids._ids is None
    step_ids.start(wanted=True)
    assert step_ids.stop() == []
