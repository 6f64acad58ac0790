"""Experts computed whole are transformers' own, bit by bit."""

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
        expected = model(ids).logits
        install_whole_experts(find_moe_layers(model))
        assert any(isinstance(module.__dict__.get("forward"), WholeExperts) for module in model.modules())
        assert torch.equal(model(ids).logits, expected)


def test_other_kinds_are_left_as_they_are() -> None:
    model = tiny_model("llama4_text")
    install_whole_experts(find_moe_layers(model))
    assert not any("forward" in module.__dict__ for module in model.modules())
