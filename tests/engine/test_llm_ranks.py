"""The engine on 1, 2 and 4 ranks gives transformers' own greedy tokens, whatever the balancer does."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moeless.engine.ep import LocalGroup
from tests.engine.ranks import RankPool
from tests.engine.regroup import alone_then_together_then_alone
from tests.engine.serving import greedy, greedy_reference, near_tie, random_prompts, run_engine
from tests.tiny import VOCAB, save_tiny_checkpoint

LOSSLESS = ["static", "eplb", "metro", "moeless", "moeless-roofline"]
FAMILIES = [
    "mixtral",
    "phimoe",
    "llama4_text",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "glm4_moe",
    "ernie4_5_moe",
    "minimax_m2",
    "dbrx",
]
NUM_TOKENS = 16
LENGTHS = (5, 31, 12, 50, 8)
STARTS = (0, 0, 0, 2, 9)


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def demo_expected(demo: PreTrainedModel) -> tuple[list[list[int]], list[list[int]]]:
    prompts = random_prompts(LENGTHS, demo.config.vocab_size)
    return prompts, greedy_reference(demo, prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def made_models() -> dict[str, PreTrainedModel]:
    """Tiny models by family, made and saved once."""
    return {}


def run_on(
    ranks: RankPool,
    size: int,
    prompts: list[list[int]],
    owners: Rows[int],
    starts: Rows[int],
    num_tokens: int = NUM_TOKENS,
    random_plans: bool = False,
    **config: Any,
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Tokens of each prompt and each rank's statistics."""
    arguments: dict[str, Any] = {
        "config": {"max_batch_tokens": 24, "max_seqs": 8, "kv_tokens": 256, **config},
        "prompts": prompts,
        "params": [greedy(num_tokens, ignore_eos=True)] * len(prompts),
        "owners": owners,
        "starts": starts,
        "random_plans": random_plans,
    }
    results = [run_engine(LocalGroup(), **arguments)] if size == 1 else ranks.run(run_engine, size, **arguments)
    made = {i: list(output.token_ids) for done, _ in results for i, output in done.items()}
    return [made[i] for i in range(len(prompts))], [statistics for _, statistics in results]


def check(model: PreTrainedModel, prompts: list[list[int]], made: list[list[int]], expected: list[list[int]]) -> None:
    for prompt, ours, theirs in zip(prompts, made, expected, strict=True):
        assert ours == theirs or near_tie(model, prompt, ours, theirs)


@pytest.mark.parametrize("balancer", LOSSLESS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_lossless_balancer(
    ranks: RankPool, demo: PreTrainedModel, demo_expected: Any, demo_model: Path, size: int, balancer: str
) -> None:
    prompts, expected = demo_expected
    owners = [i % size for i in range(len(prompts))]
    made, statistics = run_on(ranks, size, prompts, owners, STARTS, model=str(demo_model), balancer=balancer)
    check(demo, prompts, made, expected)
    assert len({s["steps"] for s in statistics}) == 1, "ranks must step together"


@pytest.mark.parametrize("config", [{}, {"expert_memory_gb": 0.02}], ids=["whole", "budget-below-model"])
def test_one_rank(demo: PreTrainedModel, demo_expected: Any, demo_model: Path, ranks: RankPool, config: Any) -> None:
    prompts, expected = demo_expected
    made, statistics = run_on(ranks, 1, prompts, [0] * len(prompts), STARTS, model=str(demo_model), **config)
    check(demo, prompts, made, expected)
    if config:
        pool = statistics[0]["experts"]["pool"]
        assert pool["resident_bytes"] <= pool["num_slots"] * 294_912 <= 0.02e9 < 12 * 16 * 294_912


def test_two_ranks_with_less_memory_than_experts(
    ranks: RankPool, demo: PreTrainedModel, demo_expected: Any, demo_model: Path
) -> None:
    prompts, expected = demo_expected
    made, statistics = run_on(ranks, 2, prompts, [0, 1, 0, 1, 1], STARTS, model=str(demo_model), expert_memory_gb=0.015)
    check(demo, prompts, made, expected)
    assert sum(s["experts"]["cold"] for s in statistics) > 0


def test_a_rank_without_requests_and_one_that_gets_them_late(
    ranks: RankPool, demo: PreTrainedModel, demo_expected: Any, demo_model: Path
) -> None:
    prompts, expected = demo_expected
    made, statistics = run_on(ranks, 4, prompts, [0, 0, 0, 2, 2], (0, 0, 0, 3, 30), model=str(demo_model))
    check(demo, prompts, made, expected)
    assert statistics[1]["idle_steps"] == statistics[1]["steps"] > 0
    assert statistics[2]["idle_steps"] >= 3


def test_preemption_on_two_ranks(ranks: RankPool, demo: PreTrainedModel, demo_expected: Any, demo_model: Path) -> None:
    prompts, expected = demo_expected
    made, statistics = run_on(ranks, 2, prompts, [0, 0, 0, 0, 1], (0,) * 5, model=str(demo_model), kv_tokens=208)
    check(demo, prompts, made, expected)
    assert statistics[0]["preemptions"] > 0
    assert all(s["kv_tokens_peak"] <= 208 for s in statistics)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_under_random_plans(
    ranks: RankPool, made_models: dict[str, PreTrainedModel], tmp_path_factory: Any, family: str, size: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"ranks-{family}"
    if family not in made_models:
        made_models[family] = save_tiny_checkpoint(family, folder)
    model = made_models[family]
    prompts = random_prompts((7, 20, 11), VOCAB)
    expected = greedy_reference(model, prompts, 8)
    owners = [0, size - 1, size // 2]
    made, statistics = run_on(
        ranks, size, prompts, owners, (0, 3, 0), num_tokens=8, random_plans=True, model=str(folder)
    )
    check(model, prompts, made, expected)
    if size > 1:
        assert statistics[0]["experts"]["plan_changes"] > statistics[0]["steps"]


@pytest.mark.parametrize("balancer", ["static", "moeless-roofline"])
def test_experts_stay_where_they_are_through_groups_of_all_sizes(
    ranks: RankPool, demo: PreTrainedModel, demo_model: Path, balancer: str
) -> None:
    """A rank that joins a smaller group reads only what it has not got; it never has two pools.

    With `moeless-roofline` prices are measured in the second group, in the pool with the experts of the first.
    """
    prompt = random_prompts((9,), demo.config.vocab_size)[0]
    expected = greedy_reference(demo, [prompt], 8)[0]
    arguments = {"model": str(demo_model), "prompt": prompt, "balancer": balancer}
    for seen in ranks.run(alone_then_together_then_alone, 2, **arguments):
        for each in seen:
            assert each["tokens"] == expected or near_tie(demo, prompt, each["tokens"], expected)
        assert len({each["pool"] for each in seen}) == 1
        if balancer != "static":  # replicas come and go as experts are measured
            continue
        assert all(each["resident_bytes"] == each["held"] * 294_912 for each in seen)
        alone, together, again = seen
        assert (alone["loads"], alone["held"]) == (192, 192)
        assert together["held"] == 96
        assert together["loads"] == 0
        assert (again["loads"], again["new"], again["held"]) == (96, 96, 192)
