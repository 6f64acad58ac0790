"""Replay against arithmetic done by hand, against the engine's calls, and on loads at the edge of what can happen."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeless.bench.simulate_predict import conditional_loads, followers, halve, predict_loads
from moeless.bench.simulate_replay import Replay, ReplaySettings, replay, replay_plans
from moeless.bench.simulate_rows import settled_after
from moeless.bench.workload import closed_loop, loads_of, switch_domain
from moeless.config.simulate import BALANCER_NAMES
from moeless.errors import CapacityError, DataError
from moeless.policy.balancers import make_balancer
from moeless.policy.config import BALANCERS
from moeless.policy.cost import CostModel
from moeless.policy.types import EpShape, LayerPlan, Placement, as_mask
from moeless.trace.files import load_trace, save_trace
from moeless.trace.loads import LoadTrace, make_loads
from moeless.trace.recorder import Recorder
from moeless.trace.routes import make_routes
from tests.traces import skewed_ids, skewed_routes

COST = CostModel(floor_us=10.0, alpha_us=0.1, beta_us=0.02, latency_us=3.0, expert_bytes=1e6, copy_bytes_per_s=1e10)
LOSSLESS = [name for name in BALANCER_NAMES if name != "oracle"]


def settings_of(shape: EpShape, **changes: object) -> ReplaySettings:
    sizes = ReplaySettings(num_ranks=shape.num_ranks, slots_per_rank=shape.slots_per_rank, distance=1, other_us=40.0)
    return replace(sizes, **changes)  # type: ignore[arg-type]


def run(
    trace: LoadTrace,
    name: str,
    num_ranks: int = 4,
    num_slots: int = 20,
    predicted: np.ndarray | None = None,
    **changes: object,
) -> Replay:
    shape = EpShape(num_experts=trace.num_experts, num_ranks=num_ranks, num_slots=num_slots)
    balancer = make_balancer(name, shape, trace.num_layers, COST)
    return replay(trace, predicted, balancer, COST, settings_of(shape, **changes))


def trace_of(num_streams: int, num_iterations: int, **kwargs: object) -> LoadTrace:
    routes = skewed_routes(**kwargs)  # type: ignore[arg-type]
    return loads_of([(routes, closed_loop(routes, num_streams, num_iterations, seed=5))], "test")


def test_the_names_on_the_command_line_are_the_balancers() -> None:
    assert tuple(BALANCERS) == BALANCER_NAMES


def test_static_is_priced_as_by_hand() -> None:
    counts = np.array([[[300, 0, 10, 20], [0, 0, 0, 0]]])
    found = run(make_loads(counts, name="hand"), "static", num_ranks=2, num_slots=4)
    slowest = max(0.1 * 300 + 0.02 * 300, 10 + 0.02 * 10 + 10 + 0.02 * 20)
    assert found.layer_us_IL.tolist() == [[pytest.approx(slowest + 3), 0]]
    assert found.bound_us_IL[0, 0] == pytest.approx((36 + 20.6) / 2 + 3)
    assert found.max_over_mean_IL.tolist() == [[pytest.approx(300 / 165), 1]]
    assert found.iteration_us_I[0] == pytest.approx(slowest + 3 + 80)
    assert found.replicas_IL.tolist() == [[4, 4]]
    assert found.resident_I.tolist() == [8]
    loads = np.array([300, 10, 20])
    assert found.replica_cv_IL[0, 0] == pytest.approx(loads.std() / loads.mean())


def test_no_balancer_is_below_the_bound_and_planning_on_the_truth_is_best() -> None:
    trace = trace_of(512, 24)
    runs = {name: run(trace, name) for name in LOSSLESS}
    for name, found in runs.items():
        assert (found.layer_us_IL >= found.bound_us_IL * (1 - 1e-9)).all(), name
    means = {name: found.layer_us_IL.mean() for name, found in runs.items()}
    assert means["bound"] <= min(means.values()) * 1.01
    assert means["moeless-roofline"] < means["static"]


def test_on_stationary_traffic_copies_die_out() -> None:
    trace = trace_of(2_048, 120, num_sequences=20, num_layers=2)
    found = run(trace, "moeless-roofline")
    assert found.copies_I.sum() > 0
    assert found.copies_I[-40:].mean() <= 0.05 * found.copies_I[:40].mean()


def test_after_a_switch_the_plan_follows() -> None:
    halves = switch_domain(skewed_routes(), "a", "b")
    trace = loads_of([(r, closed_loop(r, 2_048, 60, seed=0)) for r in halves], "switch")
    found = run(trace, "moeless-roofline")
    ratios = found.layer_us_IL.sum(1) / found.bound_us_IL.sum(1)
    after = settled_after(ratios.tolist(), 60)
    assert after is not None
    assert after <= 20
    assert ratios[60] > ratios[-10:].mean() * 1.1  # the switch did hurt


def test_settled_after() -> None:
    assert settled_after([2.0] * 5 + [1.5] * 3 + [1.0] * 40, 5) == 3
    assert settled_after([1.0] * 20, 4) == 0
    assert settled_after([*np.linspace(3, 1, 10), *[5.0] * 30], 0) == 0  # the final level is what it ends at


def test_copies_that_take_longer_come_later() -> None:
    trace = trace_of(512, 40)
    free, timed = run(trace, "moeless", free_copies=True), run(trace, "moeless")
    assert free.num_late == 0
    assert timed.num_late > 0
    assert timed.layer_us_IL.mean() >= free.layer_us_IL.mean()
    per_copy = COST.copy_us
    assert timed.copies_I.sum() * per_copy <= 4 * timed.iteration_us_I.sum() + 4 * per_copy


def test_scale_from_zero_loads_each_expert_once() -> None:
    trace = trace_of(64, 12)
    found, warm = run(trace, "static", cold_start=True), run(trace, "static")
    assert (trace.counts_ILE[0, 0] > 0).all()
    assert found.num_cold >= 16  # all of the first layer; later layers are on their way when they are needed
    assert found.copies_I.sum() == 48
    assert found.resident_I[-1] == 48
    assert found.layer_us_IL[0, 0] == pytest.approx(warm.layer_us_IL[0, 0] + 4 * COST.copy_us)
    np.testing.assert_allclose(found.layer_us_IL[-1], warm.layer_us_IL[-1])
    assert warm.num_cold == 0


@pytest.mark.parametrize("name", BALANCER_NAMES)
@pytest.mark.parametrize(("num_experts", "num_ranks", "num_slots"), [(4, 8, 16), (10, 4, 12), (16, 4, 16), (3, 1, 3)])
def test_edges_of_size_and_load(name: str, num_experts: int, num_ranks: int, num_slots: int) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 50, (12, 2, num_experts))
    counts[2] = 0
    counts[5] = 0
    counts[5, :, -1] = 5_000
    found = run(make_loads(counts, name="edges"), name, num_ranks, num_slots)
    assert np.isfinite(found.layer_us_IL).all()
    assert (found.layer_us_IL[2] == 0).all()
    assert found.max_over_mean_IL.min() >= 1


def test_fewer_slots_than_experts_is_refused() -> None:
    with pytest.raises(CapacityError, match="15 slots a layer cannot hold 16 experts"):
        run(trace_of(8, 2), "static", num_slots=15)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_k(top_k: int) -> None:
    trace = trace_of(64, 10, top_k=top_k)
    found = run(trace, "moeless-roofline")
    assert (trace.counts_ILE.sum(-1) == 64 * top_k).all()
    assert np.isfinite(found.layer_us_IL).all()


class LateEngine:
    """The engine's side of the calls, with copies that become ready three iterations after they were planned."""

    def __init__(self, name: str, shape: EpShape, num_layers: int, trace: LoadTrace, distance: int) -> None:
        self.balancer = make_balancer(name, shape, num_layers, COST)
        self.trace, self.shape, self.distance = trace, shape, distance
        self.resident = [self.balancer.initial(layer) for layer in range(num_layers)]
        self.history = [deque([placement] * 3, maxlen=3) for placement in self.resident]
        sizes = {"num_layers": num_layers, "num_experts": shape.num_experts, "num_ranks": shape.num_ranks}
        self.recorder = Recorder(**sizes, capacity=1_000)
        self.plans: list[list[LayerPlan]] = []

    def plan(self, i: int, layer: int, made: dict[int, LayerPlan]) -> None:
        predicted = self.trace.counts_ILE[i, layer] + 1.0
        made[layer] = self.balancer.plan(i, layer, predicted, self.resident[layer])
        self.resident[layer] = made[layer].placement

    def step(self, i: int) -> None:
        made: dict[int, LayerPlan] = {}
        num_layers = len(self.resident)
        for layer in range(num_layers):
            for target in [*(range(self.distance) if layer == 0 else ()), layer + self.distance]:
                if target < num_layers:
                    self.plan(i, target, made)
            ready: Placement = self.history[layer][0]
            self.history[layer].append(self.resident[layer])
            counts = self.trace.counts_ILE[i, layer].astype(np.int64)
            self.balancer.observe(i, layer, counts, self.balancer.split(layer, counts, ready))
            by_rank = np.zeros((self.shape.num_ranks, self.shape.num_experts), int)
            by_rank[i % self.shape.num_ranks] = counts
            self.recorder.record_layer(layer, by_rank, as_mask(ready, self.shape.num_ranks), counts + 1)
        self.plans.append([made[layer] for layer in range(num_layers)])
        self.recorder.end_iteration(phase="decode", num_tokens=64, duration_s=0.1)


@pytest.mark.parametrize("name", ["static", "eplb", "metro", "moeless", "moeless-roofline"])
@pytest.mark.parametrize("distance", [1, 2])
def test_a_recorded_trace_replays_to_identical_plans(name: str, distance: int, tmp_path: Path) -> None:
    trace = trace_of(512, 80)
    shape = EpShape(num_experts=16, num_ranks=4, num_slots=20)
    engine = LateEngine(name, shape, trace.num_layers, trace, distance)
    for i in range(trace.num_iterations):
        engine.step(i)
    recorded = engine.recorder.snapshot("engine")
    assert recorded is not None
    save_trace(tmp_path / "trace.safetensors", recorded)
    again = load_trace(tmp_path / "trace.safetensors")
    predicted = predict_loads("recorded", again, distance=distance, noise=0, seed=0, training=None)
    plans = replay_plans(again, make_balancer(name, shape, again.num_layers, COST), distance, predicted)
    assert plans == engine.plans
    assert name == "static" or len({plan[0].placement for plan in plans}) > 1


def test_conditional_prediction_knows_what_follows_what() -> None:
    ids = skewed_ids(400, num_layers=1, top_k=1)
    chained = np.concatenate([ids, (ids + 3) % 16, (ids + 5) % 16], axis=1)
    routes = make_routes(chained, name="chain", phase="decode", offsets=np.arange(0, 401, 10), num_experts=16)
    training, testing = halve(routes)
    assert training.num_tokens + testing.num_tokens == 400
    trace = loads_of([(testing, closed_loop(testing, 32, 10, seed=0))], "chain")
    for distance in (1, 2):
        predicted = conditional_loads(trace.counts_ILE.astype(float), followers(training, distance), distance)
        assert np.isnan(predicted[:, :distance]).all()
        seen = followers(training, distance).max(-1) > 0.999
        for i, layer in np.ndindex(10, 3 - distance):
            expected = trace.counts_ILE[i, layer + distance]
            known = np.roll(seen[layer], 3 if (layer, distance) == (0, 1) else 5 if layer == 0 else 2)
            np.testing.assert_allclose(predicted[i, layer + distance][known], expected[known], atol=3)
    beyond = conditional_loads(trace.counts_ILE.astype(float), followers(training, 7), 7)
    assert np.isnan(beyond).all()


def test_predictors_by_name() -> None:
    trace = trace_of(64, 4)
    args = {"distance": 1, "noise": 0.0, "seed": 0, "training": None}
    assert predict_loads("history", trace, **args) is None  # type: ignore[arg-type]
    np.testing.assert_array_equal(predict_loads("actual", trace, **args), trace.counts_ILE)  # type: ignore[arg-type]
    noisy = predict_loads("noisy", trace, **(args | {"noise": 0.4}))  # type: ignore[arg-type]
    assert noisy is not None
    mean = trace.counts_ILE.mean(-1, keepdims=True)
    assert (noisy >= 0.6 * trace.counts_ILE).all()
    assert (noisy <= 1.4 * trace.counts_ILE + 0.3 * mean).all()
    with pytest.raises(DataError, match="holds no predicted counts"):
        predict_loads("recorded", trace, **args)  # type: ignore[arg-type]
