"""`--verify`: sound layers agree with the plain computation, and anything wrong raises the alarm."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from moeless import LLM, SamplingParams
from moeless.config.engine import EngineConfig
from moeless.engine.dispatch import moe_reference
from moeless.engine.ep import LocalGroup
from moeless.engine.expert_layers import ExpertSettings
from moeless.engine.expert_metrics import ExpertMetrics
from moeless.engine.expert_pool import ExpertPool
from moeless.engine.verify import LayerVerifier, agree
from moeless.errors import UsageError
from moeless.models.expert_store import expert_bytes
from tests.engine.made_up import MadeUpExperts
from tests.engine.ranks import RankPool
from tests.engine.serving import random_prompts
from tests.engine.verified import run_verified
from tests.tiny import NUM_LAYERS, VOCAB, save_tiny_checkpoint

torch.set_num_threads(1)

PROMPTS = random_prompts((7, 20, 11, 5), VOCAB)
FAMILIES = ["mixtral", "phimoe", "llama4_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx", "gemma4_text"]


def samples(reports: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """What /metrics would show of these ranks' reports: (name, rank) -> value."""
    metrics = ExpertMetrics(expert_detail=False)
    for rank, report in enumerate(reports):
        metrics.update_rank(rank, report)
    found = [sample for family in metrics.collect() for sample in family.samples]
    return {(s.name.removeprefix("moeless:"), s.labels["rank"]): s.value for s in found if "verif" in s.name}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_run_has_no_mismatch(ranks: RankPool, tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(family, tmp_path)
    config = {"model": str(tmp_path), "verify": 1.0}
    reports = ranks.run(run_verified, 2, config=config, prompts=PROMPTS)
    num_layers = NUM_LAYERS - (family == "deepseek_v3")  # whose first layer is dense
    for rank, report in enumerate(reports):
        assert 8 * num_layers <= report["verify"]["verified_layers"] <= report["steps"] * num_layers
        assert samples(reports)["verify_mismatches_total", str(rank)] == 0


def test_half_precision_is_no_mismatch(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_checkpoint("qwen3_moe", tmp_path)
    for dtype in ("bfloat16", "float16"):
        config = {"model": str(tmp_path), "verify": 1.0, "dtype": dtype}
        for report in ranks.run(run_verified, 2, config=config, prompts=PROMPTS):
            assert report["verify"]["verified_layers"] > 0
            assert report["verify"]["mismatches"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_number_in_a_slot_raises_the_alarm(ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    """On the rank that holds it and on the one that sent it tokens; other layers are not blamed."""
    save_tiny_checkpoint("mixtral", tmp_path)
    config = {"model": str(tmp_path), "verify": 1.0, "dtype": dtype, "balancer": "static"}
    reports = ranks.run(run_verified, 2, config=config, prompts=PROMPTS, garbage_on=1)
    shown = samples(reports)
    for rank in ("0", "1"):
        assert 0 < shown["verify_mismatches_total", rank] <= shown["verified_layers_total", rank] / NUM_LAYERS


def test_the_log_names_layer_iteration_and_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_checkpoint("mixtral", tmp_path)
    config = {"model": str(tmp_path), "verify": 1.0}
    with caplog.at_level(logging.WARNING, "moeless"):
        report = run_verified(LocalGroup(), config=config, prompts=PROMPTS, garbage_on=0)
    found = [record.getMessage() for record in caplog.records]
    assert found[0].startswith("MoE layer 1 of iteration 0 is wrong for ")
    assert "tokens, by up to " in found[0]
    assert report["verify"]["mismatches"] > 2
    assert len(found) == report["verify"]["mismatches"].bit_length()  # the 1st, 2nd, 4th ...


def test_the_sample_is_a_share_and_the_same_everywhere() -> None:
    source = MadeUpExperts()
    first, second = (LayerVerifier(source, 0.1, "cpu") for _ in range(2))
    places = [(i, layer) for i in range(2_000) for layer in range(4)]
    due = [place for place in places if first.is_due(*place)]
    assert due == [place for place in places if second.is_due(*place)]
    assert 0.08 < len(due) / len(places) < 0.12
    assert {layer for _, layer in due} == {0, 1, 2, 3}
    assert all(LayerVerifier(source, 1.0, "cpu").is_due(*place) for place in places)


def test_plain_is_the_reference_and_reads_no_slot() -> None:
    source = MadeUpExperts()
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn(9, source.hidden, generator=generator)
    ids_TK = torch.rand(9, source.num_experts, generator=generator).argsort(1)[:, :2]
    weights_TK = torch.rand(9, 2, generator=generator)
    expected = moe_reference(
        x_TH, ids_TK, weights_TK, lambda expert, rows: source.ffns[1](rows, source.weights(1, expert))
    )
    plain = LayerVerifier(source, 1.0, "cpu").plain(1, x_TH, ids_TK, weights_TK)
    torch.testing.assert_close(plain, expected)


def test_an_expert_that_cannot_be_read_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    source = MadeUpExperts()
    source.failing = {(0, 1)}
    verifier = LayerVerifier(source, 1.0, "cpu")
    x_TH, ids_TK = torch.ones(1, source.hidden), torch.tensor([[1]])
    verifier.check(3, 0, x_TH, ids_TK, torch.ones(1, 1), x_TH)
    verifier.check(3, 0, x_TH[:0], ids_TK[:0], torch.ones(0, 1), x_TH[:0])  # an idle rank has nothing to compare
    assert vars(verifier.stats) == {"verified_layers": 0, "mismatches": 0, "unreadable": 1}
    assert "cannot be verified" in caplog.text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.3])
def test_what_agrees(bad: float) -> None:
    expected = torch.tensor([[1.0, -2.0], [0.0, 0.0], [float("nan"), 1.0]])
    assert agree(expected, expected).all()
    assert agree(expected + 1e-6 * torch.tensor([[1.0], [0.0], [1.0]]), expected).all()
    for token in range(3):
        actual = expected.clone()
        actual[token, 1] = bad
        assert agree(actual, expected).tolist() == [other != token for other in range(3)]


def test_it_works_in_llm_where_there_is_one_rank(tmp_path: Path) -> None:
    save_tiny_checkpoint("olmoe", tmp_path)
    with LLM(str(tmp_path), verify=1.0) as llm:
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        (report,) = [rank["experts"] for rank in llm.statistics()["ranks"]]
    assert report["verify"] == {"verified_layers": 3 * NUM_LAYERS, "mismatches": 0, "unreadable": 0}


def test_without_it_nothing_is_shown(tmp_path: Path, ranks: RankPool) -> None:
    """A zero would look like a clean bill."""
    save_tiny_checkpoint("mixtral", tmp_path)
    reports = ranks.run(run_verified, 2, config={"model": str(tmp_path)}, prompts=PROMPTS)
    assert samples(reports) == {}


def test_values_that_make_no_sense() -> None:
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="--verify must be at"):
            EngineConfig(model="m", verify=value)
    with pytest.raises(UsageError, match=r"--verify 0\.5 does not go with --balancer oracle"):
        EngineConfig(model="m", ep=2, verify=0.5, balancer="oracle")


def test_the_budget_has_room_for_the_second_copy() -> None:
    source, group = MadeUpExperts(num_layers=3, num_experts=8), LocalGroup()
    group.size = 2
    budget_bytes = 8 * expert_bytes(source)
    shape = ExpertSettings().shape(8, 2)
    assert ExpertSettings(budget_bytes=budget_bytes).slots_per_rank(source, shape, group) == 8
    assert ExpertSettings(budget_bytes=budget_bytes, verify=0.1).slots_per_rank(source, shape, group) == 7
    assert ExpertPool.slots_within(source, budget_bytes, "cpu") == 8
