"""Experts computed whole on a CPU give transformers' own results."""

from __future__ import annotations

import pytest
import torch

from moeless.models.family import find_moe_layers
from moeless.models.whole_experts import WholeExperts, install_whole_experts
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3"])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_results_are_the_usual_ones(family: str, num_tokens: int) -> None:
    model = tiny_model(family)
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(0, 128, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    with torch.inference_mode():
        expected, num_bytes = model(ids).logits, sum(w.nbytes for w in model.parameters())
        install_whole_experts(find_moe_layers(model))
        assert any(isinstance(module.__dict__.get("forward"), WholeExperts) for module in model.modules())
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert sum(w.nbytes for w in model.parameters()) == num_bytes


def test_other_kinds_are_left_as_they_are() -> None:
    for model in (tiny_model("llama4_text"), tiny_model("mixtral").bfloat16()):
        install_whole_experts(find_moe_layers(model))
        assert not any("forward" in module.__dict__ for module in model.modules())
