"""Whole models over expert-parallel layers against plain transformers: exact tokens whatever the plans do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from moeless.bench.simulate_predict import predict_loads
from moeless.bench.simulate_replay import replay_plans
from moeless.config.model import ModelConfig
from moeless.engine.ep import LocalGroup
from moeless.engine.expert_layers import ExpertSettings, build_expert_layers
from moeless.errors import CapacityError
from moeless.models.expert_store import expert_bytes
from moeless.models.family import supports_packing
from moeless.models.weights import load_skeleton
from moeless.policy.balancers import make_balancer
from moeless.policy.cost import TOKENS
from moeless.policy.types import EpShape
from tests.engine import work
from tests.engine.made_up import MadeUpExperts
from tests.engine.ranks import RankPool
from tests.tiny import FAMILIES, NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCAB, save_tiny_checkpoint

torch.set_num_threads(1)

NUM_NEW = 6
SERVED = ["mixtral", "phimoe", "llama4_text", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"]
SERVED += ["qwen2_moe", "deepseek_v2", "granitemoe", "dbrx", "minimax_m2", "ernie4_5_moe", "gemma4_text"]


class Reference:
    """Checkpoints and what transformers generates from them, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, PreTrainedModel] = {}

    def model(self, family: str) -> tuple[str, PreTrainedModel]:
        path = self._folder / family
        if family not in self._models:
            self._models[family] = save_tiny_checkpoint(family, path)
        return str(path), self._models[family]

    def tokens(self, family: str, prompts: list[list[int]]) -> list[list[int]]:
        if not prompts:
            return []
        _, model = self.model(family)
        settings = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        ids = torch.tensor(prompts)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return output[:, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("checkpoints"))


def make_prompts(sizes: list[int], length: int = 7) -> list[list[list[int]]]:
    """As many prompts for each rank as `sizes` says."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n, length), generator=generator).tolist() for n in sizes]


def check(
    ranks: RankPool, reference: Reference, family: str, prompts: list[list[list[int]]], **how: Any
) -> list[dict[str, Any]]:
    folder, _ = reference.model(family)
    results = ranks.run(work.generate, len(prompts), folder=folder, prompts=prompts, num_new=NUM_NEW, **how)
    for rank, result in enumerate(results):
        assert result["tokens"] == reference.tokens(family, prompts[rank]), f"{family}, rank {rank}"
        assert result["wrong_slots"] == []
        assert result["placements"] == results[0]["placements"]
    shared = [{k: v for k, v in r["metrics"].items() if k in ("warm", "cold", "late", "copies")} for r in results]
    assert all(s == shared[0] for s in shared)
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_gives_the_models_logits(reference: Reference, family: str) -> None:
    folder, model = reference.model(family)
    loaded, store = load_skeleton(ModelConfig(model=folder))
    layers = build_expert_layers(loaded.model, loaded.layers, store, LocalGroup(), ExpertSettings())
    layers.load_initial()
    layers.begin_step(0)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        actual, expected = loaded.model(ids).logits, model(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 if supports_packing(model) else 1e-5)
    layers.idle_step()
    layers.close()


@pytest.mark.parametrize("sizes", [[3], [2, 1], [1, 0, 2, 1]], ids=["1-rank", "2-ranks", "4-ranks"])
@pytest.mark.parametrize("family", SERVED)
def test_greedy_tokens_under_random_plans(ranks: RankPool, reference: Reference, family: str, sizes: list[int]) -> None:
    results = check(ranks, reference, family, make_prompts(sizes), begin=(0, 2, 0, 1), settle_loads=True)
    top_k = 1 if family == "llama4_text" else TOP_K
    counts = results[0]["counts"]
    assert sum(r["metrics"]["pool"]["rows_computed"] for r in results) == counts.sum()  # each pair once
    at_first = sum(size for size, begin in zip(sizes, (0, 2, 0, 1), strict=False) if begin == 0)
    assert counts[0].sum(-1).tolist() == [at_first * 7 * top_k] * counts.shape[1]
    assert (results[0]["metrics"]["plan_changes"] > 0) == (len(sizes) > 1)


@pytest.mark.parametrize("balancer", ["static", "eplb", "metro", "moeless", "moeless-roofline"])
def test_greedy_tokens_with_every_balancer(ranks: RankPool, reference: Reference, balancer: str) -> None:
    check(ranks, reference, "mixtral", make_prompts([2, 0, 1, 3]), balancer=balancer, predict=True)


def test_replicas_on_the_move_and_an_idle_rank(ranks: RankPool, reference: Reference) -> None:
    """Nobody waits for the loader here, so replicas are late, and cold where a plan outran it."""
    for family in ("qwen3_moe", "gpt_oss"):
        results = check(ranks, reference, family, make_prompts([1, 0, 2, 1]), begin=(3, 0, 0, 5), num_slots=20)
        metrics = results[0]["metrics"]
        assert metrics["copies"] > 0
        assert metrics["plans"]["failed"] == 0


@pytest.mark.parametrize("predict", [False, True])
def test_a_model_larger_than_the_budget(ranks: RankPool, reference: Reference, predict: bool) -> None:
    """Two ranks with room for nine experts of 32 each: exact, by cold starts."""
    results = check(
        ranks, reference, "mixtral", make_prompts([2, 1]), balancer="static", budget_experts=9.5, predict=predict
    )
    for result in results:
        assert result["metrics"]["cold"] > 0
        assert result["metrics"]["pool"]["num_slots"] == 9
        assert result["metrics"]["pool"]["resident_bytes"] <= 9.5 * 4 * 3 * 64 * 96
        assert (result["metrics"]["copies"] > 0) == predict


def test_loads_are_counted_once(ranks: RankPool, reference: Reference) -> None:
    """Tokens times k in each layer, whatever the number of ranks; sources add up."""
    for sizes in ([3], [2, 1], [1, 1, 0, 1]):
        results = check(ranks, reference, "mixtral", make_prompts(sizes), balancer="static")
        for result in results:
            counts = result["counts"]
            assert counts.shape == (NUM_NEW, NUM_LAYERS, NUM_EXPERTS)
            per_layer = [[3 * (7 + step) * TOP_K] * NUM_LAYERS for step in range(NUM_NEW)]
            assert counts.sum(-1).tolist() == per_layer
            assert (result["rank_counts"].sum(2) == counts).all()


@pytest.mark.parametrize("fault", ["slow", "unreadable", "killed"])
def test_loads_that_fail_are_left_out_and_shown(ranks: RankPool, reference: Reference, fault: str) -> None:
    results = check(ranks, reference, "mixtral", make_prompts([2, 1]), fault=fault, num_slots=12)
    pools = [result["metrics"]["pool"] for result in results]
    num_loads = sum(pool["loads"] + pool["failures"] - pool["cold_loads"] for pool in pools)
    assert results[0]["metrics"]["late"] >= num_loads - NUM_LAYERS * NUM_EXPERTS > 0  # all but the initial ones
    if fault == "unreadable":
        assert all(pool["failures"] > 0 and "Input/output error" in pool["last_error"] for pool in pools)
    if fault == "killed":
        assert all(pool["loader_restarts"] > 0 and "loader thread died" in pool["last_error"] for pool in pools)


def test_a_failing_planner_leaves_the_last_placement_serving(ranks: RankPool, reference: Reference) -> None:
    results = check(ranks, reference, "mixtral", make_prompts([2, 1]), fault="planner")
    metrics = results[0]["metrics"]
    assert metrics["plans"]["failed"] == (NUM_NEW - 2) * NUM_LAYERS
    assert "the planner is broken" in metrics["last_error"]
    before, *after = results[0]["placements"][1:]
    assert all(placements == before for placements in after)


def test_a_division_that_loses_tokens_is_not_used(ranks: RankPool, reference: Reference) -> None:
    metrics = check(ranks, reference, "mixtral", make_prompts([2, 1]), fault="divider")[0]["metrics"]
    assert metrics["failed_splits"] == (NUM_NEW - 2) * NUM_LAYERS
    assert "the shares are not the counts" in metrics["last_error"]


@pytest.mark.parametrize("balancer", ["eplb", "moeless", "moeless-roofline"])
def test_the_simulator_replays_the_engines_plans(ranks: RankPool, reference: Reference, balancer: str) -> None:
    result = check(ranks, reference, "mixtral", make_prompts([3, 2]), balancer=balancer, predict=True, replayable=True)[
        0
    ]
    trace = result["trace"]
    predicted = (
        predict_loads("recorded", trace, distance=1, noise=0, seed=0, training=None)
        if (trace.predicted_ILE is not None)
        else None
    )
    shape = EpShape(NUM_EXPERTS, 2, NUM_EXPERTS + 2)
    plans = replay_plans(trace, make_balancer(balancer, shape, NUM_LAYERS, TOKENS), 1, predicted)
    assert [[plan.placement for plan in step] for step in plans] == result["placements"]
    if balancer == "moeless":
        assert predicted is not None
        assert result["metrics"]["plan_changes"] > 0
        assert result["metrics"]["plans"]["predicted"] == (NUM_LAYERS - 1) * NUM_NEW


def test_the_oracle_is_perfectly_balanced_and_lossy(ranks: RankPool, reference: Reference) -> None:
    folder, _ = reference.model("mixtral")
    results = ranks.run(
        work.generate, 2, folder=folder, prompts=make_prompts([4, 4]), num_new=NUM_NEW, balancer="oracle"
    )
    rows = [result["metrics"]["pool"]["rows_computed"] for result in results]
    assert rows[0] == rows[1]


def test_survivors_of_a_killed_rank_form_a_group_and_go_on(ranks: RankPool, reference: Reference) -> None:
    folder, _ = reference.model("mixtral")
    prompts = make_prompts([2, 1, 2])
    results = ranks.run(
        work.generate_through_a_death,
        3,
        folder=folder,
        prompts=prompts,
        num_new=NUM_NEW,
        port=ranks.port,
        generation=1_000_000,
        dying=(2,),
    )
    for rank in (0, 1):
        assert results[rank]["tokens"] == reference.tokens("mixtral", prompts[rank])
        assert "no answer from rank 2" in results[rank]["told"]
        assert results[rank]["wrong_slots"] == []
        before, after = results[rank]["loads"]
        assert 0 < before < after < before + NUM_LAYERS * NUM_EXPERTS / 2  # what was there was not read again


@pytest.mark.parametrize("predicts", [False, True])
def test_scaled_to_zero_only_tokens_and_predictions_bring_experts_back(reference: Reference, predicts: bool) -> None:
    folder, model = reference.model("mixtral")
    loaded, store = load_skeleton(ModelConfig(model=folder))
    predictors = [None, *(layer.route for layer in loaded.layers[1:])] if predicts else ()
    settings = ExpertSettings(keep_alive_s=1.0, scale_to_zero=True)
    layers = build_expert_layers(loaded.model, loaded.layers, store, LocalGroup(), settings, predictors=predictors)
    layers.load_initial()
    meters = layers.controller.meters
    copies = meters.copies
    assert copies == NUM_LAYERS * NUM_EXPERTS
    assert layers.rest(5_000_000) == pytest.approx(1.125)
    assert layers.rest(6_000_000) == math.inf
    assert layers.pool.resident_bytes == 0
    layers.begin_step(7_000_000)
    ids = torch.randint(3, VOCAB, (1, 5), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)
    layers.pool.wait_idle()
    assert meters.cold > 0
    assert (meters.copies > copies) == predicts
    assert 0 < layers.pool.resident_bytes < NUM_LAYERS * NUM_EXPERTS * layers.pool.expert_bytes
    layers.close()


def test_a_budget_that_no_plan_could_work_with_is_refused() -> None:
    source, group = MadeUpExperts(num_layers=3, num_experts=8), LocalGroup()
    group.size = 2
    size = expert_bytes(source)
    for slots, settings in ((6, ExpertSettings(budget_bytes=6 * size)), (17, ExpertSettings())):
        assert settings.slots_per_rank(source, settings.shape(8, 2), group) == slots  # 5 a layer, and 2 spare
    settings = ExpertSettings(budget_bytes=6 * size - 1)
    with pytest.raises(CapacityError, match="hold 5 experts, but a plan may put 5 of one layer on a rank"):
        settings.slots_per_rank(source, settings.shape(8, 2), group)
