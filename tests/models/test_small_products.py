"""Small products in numpy are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moeless.models.small_products import SmallLinear, install_small_linears, multiply_by_expert


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


@pytest.mark.parametrize("bias", [True, False])
def test_small_linear_layers_are_the_usual_ones(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    inputs = [torch.randn(shape) for shape in ((64,), (3, 64), (1, 5, 64), (2, 400, 64), (0, 64))]
    model = nn.Sequential(linear)
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        install_small_linears(model)
        assert isinstance(linear.forward, SmallLinear)
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-6)


def test_other_layers_are_left_as_they_are() -> None:
    embeddings, half, large = nn.Embedding(32, 16), nn.Linear(16, 16).bfloat16(), nn.Linear(512, 1024)
    head = nn.Linear(16, 32, bias=False)
    head.weight = embeddings.weight
    install_small_linears(nn.ModuleList([embeddings, head, half, large]), but=embeddings)
    assert not any("forward" in module.__dict__ for module in (head, half, large))
