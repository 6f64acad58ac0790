"""Finding routers and experts in tiny random models of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, NUM_EXPERTS, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from moeless.errors import UnsupportedModelError
from moeless.models.checkpoint import check_family
from moeless.models.family import REFUSED, experts_per_token, find_moe_layers
from moeless.models.probe import probe_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_router_ids_are_the_ids_the_experts_use(family: str) -> None:
    model = tiny_model(family)
    layers = find_moe_layers(model)
    points = probe_layers(model, layers, torch.device("cpu"))  # raises where they differ
    assert [layer.ordinal for layer in layers] == list(range(len(layers)))
    assert all(layer.num_experts == NUM_EXPERTS for layer in layers)
    assert len({layer.decoder_layer for layer in layers}) == len(layers) >= 2
    top_k = 1 if family == "llama4_text" else 2
    assert all(point.top_k == top_k for point in points)
    assert experts_per_token(model, layers) == top_k
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_in_front_of_the_router_gives_its_input(family: str) -> None:
    model = tiny_model(family)
    points = probe_layers(model, find_moe_layers(model), torch.device("cpu"))
    if family in ("flex_olmo", "gemma4_text"):  # their routers read the residual stream itself
        assert all(point.norm is None for point in points)
        return
    point, seen = points[-1], {}
    assert point.norm is not None
    point.norm.register_forward_hook(lambda m, a, o: seen.update(norm=o))
    point.layer.router.register_forward_hook(lambda m, a, o: seen.update(router=a[0]))
    with torch.no_grad():
        model(torch.arange(3, 14)[None], use_cache=False)
    assert torch.equal(seen["norm"].reshape(-1, 64), seen["router"].reshape(-1, 64))


def test_llama4_with_dense_layers_between() -> None:
    model = tiny_model("llama4_text", interleave_moe_layer_step=2)
    assert [layer.decoder_layer for layer in find_moe_layers(model)] == [1, 3]


def test_layers_are_found_without_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    assert [layer.decoder_layer for layer in find_moe_layers(model)] == [1, 2, 3]


def test_dense_model_is_refused_by_name() -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    with pytest.raises(UnsupportedModelError, match=r"'llama' .* is a dense model"):
        check_family(config)


@pytest.mark.parametrize("family", ["jetmoe", "zaya", "deepseek_v4", "longcat_flash"])
def test_families_that_cannot_work_are_refused_with_the_reason(family: str) -> None:
    values: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
        check_family(AutoConfig.for_model(family, **values))


def test_quantised_checkpoint_is_refused() -> None:
    config = tiny_config("gpt_oss")
    config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(UnsupportedModelError, match=r"quantised .*mxfp4"):
        check_family(config)


def test_model_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not a causal language model"):
        check_family(AutoConfig.for_model("vit"))
