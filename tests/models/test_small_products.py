"""Small products in numpy are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moeless.models.small_products import SmallLinear, install_small_linears, multiply_by_expert, to_panels


@pytest.mark.parametrize("num_outputs", [96, 48, 33, 7])
def test_few_rows_and_many_are_multiplied_alike(num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [0, 1, 2, 2000, 0, 17]  # 2000 x 64 x 96 is not small
    x_RH = torch.randn(sum(counts), 64, generator=generator)
    weight_EOH = torch.randn(len(counts), num_outputs, 64, generator=generator)
    parts = zip(x_RH.split(counts), weight_EOH, strict=True)
    expected = torch.cat([F.linear(rows, weight) for rows, weight in parts])
    actual = multiply_by_expert(x_RH, to_panels(weight_EOH), counts)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_small_linear_layers_are_the_usual_ones(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    inputs = [torch.randn(shape) for shape in ((64,), (3, 64), (1, 5, 64), (2, 900, 64), (0, 64), (1, 0, 64))]
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
