"""Gates and predictors of every router kind: the model's own ids on the true input, adapters term by term."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, HIDDEN, NUM_EXPERTS, tiny_model

from moeless.errors import UnsupportedModelError
from moeless.models.family import find_moe_layers
from moeless.models.gate import Gate
from moeless.models.predictor import Predictor
from moeless.models.predictor_file import TunedWeights
from moeless.models.probe import ProbedLayer, probe_layers
from moeless.train.taps import tapped

SIGMOID = {"deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "dots1", "exaone_moe", "solar_open", "afmoe"}
SIGMOID |= {"lfm2_moe"}


def probed(family: str, seed: int = 0) -> tuple[torch.nn.Module, list[ProbedLayer]]:
    torch.set_num_threads(1)
    model = tiny_model(family, seed)
    return model, probe_layers(model, find_moe_layers(model), torch.device("cpu"))


def random_weights(rank: int) -> TunedWeights:
    generator = torch.Generator().manual_seed(1)
    weight, down, up = (
        torch.randn(*shape, generator=generator)
        for shape in ((NUM_EXPERTS, HIDDEN), (rank, HIDDEN), (NUM_EXPERTS, rank))
    )
    return TunedWeights(weight_EH=weight, down_RH=down, up_ER=up) if rank else TunedWeights(weight_EH=weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_true_input_the_ids_are_the_models_own(family: str) -> None:
    model, points = probed(family)
    ids = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tapped(points, ("layer_input",)) as taps:
        model(input_ids=ids, use_cache=False)
    for point, tap in zip(points, taps, strict=True):
        predictor = Predictor(point, source="gate-input", distance=0)
        used = tap.ids[0].sort(-1).values
        assert torch.equal(predictor.predict(tap.gate_input[0]).sort(-1).values, used)
        predictor.use(TunedWeights(weight_EH=predictor.gate.weight_EH.clone()))
        assert torch.equal(predictor.predict(tap.gate_input[0]).sort(-1).values, used)
        assert predictor.num_parameters == NUM_EXPERTS * HIDDEN


@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_is_the_familys(family: str) -> None:
    _, points = probed(family)
    assert Gate(points[-1]).scoring == ("sigmoid" if family in SIGMOID else "softmax")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma4_text"])
def test_the_router_computes_the_adapters_formula(family: str) -> None:
    """The router's own logits, recorded while it predicts, are W x + b + B gelu(A x)."""
    _, points = probed(family)
    predictor = Predictor(points[-1], source="gate-input", distance=1, weights=random_weights(3))
    outputs: list[torch.Tensor] = []

    def record(module: torch.nn.Module, args: object, output: object) -> None:
        tensors = [output] if isinstance(output, torch.Tensor) else list(output)  # type: ignore[call-overload]
        outputs.extend(t for t in tensors if t.is_floating_point() and t.shape == (20, NUM_EXPERTS))

    predictor.gate.router.register_forward_hook(record)
    x_TH = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2))
    predictor.predict(x_TH)
    expected = predictor.reference_logits(x_TH)
    assert any(torch.allclose(t, expected, rtol=1e-4, atol=1e-4) for t in outputs)


def test_a_zero_adapter_changes_nothing() -> None:
    _, points = probed("deepseek_v3")
    predictor = Predictor(points[-1], source="gate-input", distance=1)
    x_TH = torch.randn(200, HIDDEN)
    before = predictor.predict(x_TH)
    weights = random_weights(5)
    predictor.use(
        TunedWeights(
            weight_EH=predictor.gate.weight_EH.clone(), down_RH=weights.down_RH, up_ER=torch.zeros(NUM_EXPERTS, 5)
        )
    )
    assert torch.equal(predictor.predict(x_TH), before)
    predictor.use(None)
    assert torch.equal(predictor.predict(x_TH), before)


def test_a_router_that_norms_its_input_takes_no_adapter() -> None:
    _, points = probed("gemma4_text")
    assert not Gate(points[0]).takes_adapter
    with pytest.raises(UnsupportedModelError, match=r"Gemma4TextRouter.*--adapter-rank 0"):
        Predictor(points[0], source="gate-input", distance=1, weights=random_weights(3))


def test_the_linear_input_of_a_router_that_norms() -> None:
    """gemma4's linear map reads a normed and scaled vector; its logits from there give the router's probabilities."""
    _, points = probed("gemma4_text")
    gate = Gate(points[0])
    x_TH = torch.randn(9, HIDDEN)
    expected = gate.router(x_TH)[0]
    torch.testing.assert_close(gate.logits(gate.linear_input(x_TH)).softmax(-1), expected)


def test_a_gate_is_private() -> None:
    """Neither do the model's hooks see it, nor does the model see its weights."""
    _, points = probed("mixtral")
    router = points[0].layer.router
    calls: list[int] = []
    handle = router.register_forward_hook(lambda module, args, output: calls.append(1))
    try:
        gate = Gate(points[0])
        before = router.weight.clone()
        gate.set_weight(torch.zeros(NUM_EXPERTS, HIDDEN))
        gate.route(torch.randn(3, HIDDEN))
    finally:
        handle.remove()
    assert not calls
    assert torch.equal(router.weight, before)
    assert gate.router.training is False


def test_a_router_without_a_linear_map_is_refused_by_name() -> None:
    _, points = probed("mixtral")

    class Bent(type(points[0].layer.router)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> object:
            logits, scores, ids = super().forward(hidden_states)
            return logits.square(), scores, ids

    points[0].layer.router.__class__ = Bent
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp\.gate .*one linear map"):
        Gate(points[0])
