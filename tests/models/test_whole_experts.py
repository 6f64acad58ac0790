"""Experts computed whole on a CPU give transformers' own results."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from moeless.models.family import find_moe_layers
from moeless.models.whole_experts import WholeExperts, install_whole_experts, multiply_by_expert
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3"])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_results_are_the_usual_ones(family: str, num_tokens: int) -> None:
    model = tiny_model(family)
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(0, 128, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    with torch.inference_mode():
        expected, state = model(ids).logits, {name: w.clone() for name, w in model.state_dict().items()}
        install_whole_experts(find_moe_layers(model))
        assert any(isinstance(module.__dict__.get("forward"), WholeExperts) for module in model.modules())
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert all(torch.equal(w, state[name]) for name, w in model.state_dict().items())


@pytest.mark.parametrize("stored_by_output", [True, False])
def test_few_rows_and_many_are_multiplied_alike(stored_by_output: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [0, 1, 2, 300, 0, 17]  # 300 x 64 x 256 is not small
    x_RH = torch.randn(sum(counts), 64, generator=generator)
    weight_EHO = torch.randn(len(counts), 64, 256, generator=generator)
    if stored_by_output:
        weight_EHO = weight_EHO.transpose(1, 2).contiguous().transpose(1, 2)
    ends_E = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    expected = F.grouped_mm(x_RH, weight_EHO, offs=ends_E)
    torch.testing.assert_close(multiply_by_expert(x_RH, weight_EHO, counts), expected, rtol=1e-5, atol=1e-4)


def test_other_kinds_are_left_as_they_are() -> None:
    for model in (tiny_model("llama4_text"), tiny_model("mixtral").bfloat16()):
        install_whole_experts(find_moe_layers(model))
        assert not any("forward" in module.__dict__ for module in model.modules())
