from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases import GPT_OSS_H200, layers, skewed_loads
from hypothesis import given, settings

from moeless.errors import CapacityError
from moeless.policy.budget import share_slots
from moeless.policy.cost import TOKENS, CostModel
from moeless.policy.eplb import eplb
from moeless.policy.flow import metro
from moeless.policy.improve import StepPrice, improve, proposals
from moeless.policy.layout import Layout
from moeless.policy.placer import place
from moeless.policy.portfolio import candidates, price, rank_times, slowest_times
from moeless.policy.scaler import scale
from moeless.policy.seeds import packing, ring
from moeless.policy.split import even, home
from moeless.policy.two_speed import align, best_start, thinned
from moeless.policy.types import EpShape, check_placement, moves, num_replicas, static_placement

SHAPE = EpShape(32, 8, 40)


def noisy_samples(num: int, num_tokens: int, seed: int, num_experts: int = 32) -> np.ndarray:
    """Iterations of one traffic: the same popularity, other tokens."""
    rng = np.random.default_rng(seed)
    popularity = rng.gamma(0.7, 1, num_experts) + 1e-3
    return rng.multinomial(num_tokens, popularity / popularity.sum(), size=num).astype(np.int64)


@given(layers())
@settings(max_examples=200, deadline=None)
def test_seeds_and_portfolio_are_legal(case: tuple[list[int], EpShape]) -> None:
    loads, shape = case
    for most in (1, 2, 3, shape.num_ranks):
        check_placement(ring([float(x) for x in loads], shape, most), shape)
        check_placement(packing([float(x) for x in loads], shape, most), shape)
    for placement in candidates(np.array([loads]), shape, GPT_OSS_H200):
        check_placement(placement, shape)


def test_ring_links_all_ranks() -> None:
    placement = ring([float(32 - e) for e in range(32)], SHAPE)
    links: dict[int, set[int]] = {rank: set() for rank in range(8)}
    for ranks in placement:
        for rank in ranks:
            links[rank] |= set(ranks)
    reached = {0}
    for _ in range(8):
        reached |= {other for rank in reached for other in links[rank]}
    assert reached == set(range(8))
    assert sorted(len(ranks) for ranks in placement) == [1] * 24 + [2] * 8


@pytest.mark.parametrize("num_tokens", [16, 256, 2048, 16384])
def test_never_worse_than_the_rivals_on_the_samples(num_tokens: int) -> None:
    samples_KE = noisy_samples(8, num_tokens, seed=num_tokens)
    cost = GPT_OSS_H200
    start = static_placement(32, 8)
    chosen = best_start(start, samples_KE, samples_KE, start, SHAPE, cost, StepPrice())
    ours = price(chosen, samples_KE, 8, cost)
    mean_E = samples_KE.mean(0)
    plan = eplb(mean_E, SHAPE)
    eplb_layout = Layout(plan.placement, 8, plan.multiplicity_EG)
    copies = scale(mean_E.tolist(), 40, 8, 0.2)
    paper_layout = Layout(place(mean_E.tolist(), copies, SHAPE), 8)
    rivals = {
        "static": [home(w, Layout(start, 8)) for w in samples_KE],
        "eplb": [even(w, eplb_layout) for w in samples_KE],
        "metro": [metro(w, eplb_layout) for w in samples_KE],
        "moeless": [even(w, paper_layout) for w in samples_KE],
    }
    for name, splits in rivals.items():
        assert ours <= np.mean([cost.rank_us(shares).max() for shares in splits]) * 1.002, name


def test_pricing_stops_early_only_when_the_limit_is_exceeded() -> None:
    samples_KE = noisy_samples(6, 3000, seed=1)
    placement = static_placement(32, 8)
    exact = price(placement, samples_KE, 8, GPT_OSS_H200)
    assert slowest_times(placement, samples_KE, 8, GPT_OSS_H200, exact * 0.999) is None
    times = slowest_times(placement, samples_KE, 8, GPT_OSS_H200, exact * 1.001)
    assert times is not None
    assert times.mean() == pytest.approx(exact)


@pytest.mark.parametrize("cost", [TOKENS, GPT_OSS_H200])
def test_improving_is_legal_and_never_worse(cost: CostModel) -> None:
    samples_KE = noisy_samples(6, 2048, seed=2)
    placement = static_placement(32, 8)
    before = price(placement, samples_KE, 8, cost)
    for option in proposals(placement, rank_times(placement, samples_KE, 8, cost), samples_KE, SHAPE, cost):
        check_placement(option, SHAPE)
    better, time = improve(placement, samples_KE, SHAPE, cost, steps=6)
    check_placement(better, SHAPE)
    assert time == pytest.approx(price(better, samples_KE, 8, cost))
    assert time < before * 0.9


def test_a_step_has_to_pay_for_its_copies() -> None:
    samples_KE = noisy_samples(6, 2048, seed=3)
    placement = static_placement(32, 8)
    dear, _ = improve(placement, samples_KE, SHAPE, GPT_OSS_H200, 3, StepPrice(us_per_copy=1e6))
    assert dear == placement
    fair, _ = improve(placement, samples_KE, SHAPE, GPT_OSS_H200, 3, StepPrice(us_per_copy=1.0))
    assert 0 < len(moves(placement, fair)[0]) <= 6


def test_renaming_ranks_saves_copies_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    weights = rng.gamma(1.0, 1.0, 32).tolist()
    placement = ring(weights, SHAPE)
    renamed = tuple(tuple(sorted((rank + 3) % 8 for rank in ranks)) for ranks in placement)
    assert align(renamed, placement, SHAPE) == placement
    other = ring(rng.permutation(weights).tolist(), SHAPE)
    aligned = align(other, placement, SHAPE)
    check_placement(aligned, SHAPE)
    assert len(moves(placement, aligned)[0]) < len(moves(placement, other)[0])
    samples_KE = noisy_samples(4, 2048, seed=4)
    assert price(aligned, samples_KE, 8, TOKENS) == price(other, samples_KE, 8, TOKENS)
    two_nodes = dataclasses.replace(SHAPE, num_nodes=2)
    assert align(other, placement, two_nodes) == other


def test_thinning_is_even_and_keeps_the_newest() -> None:
    rows = np.arange(33)[:, None]
    assert thinned(rows, 5).ravel().tolist() == [0, 8, 16, 24, 32]
    assert thinned(rows[:3], 5).ravel().tolist() == [0, 1, 2]


def test_budget_goes_where_it_helps_and_is_never_above_uniform() -> None:
    rng = np.random.default_rng(6)
    skewed = [np.stack([skewed_loads(rng, 16, 4000) for _ in range(4)]) for _ in range(2)]
    flat = [np.full((4, 16), 250) for _ in range(2)]
    shape = EpShape(16, 4, 16)
    budget = share_slots([*skewed, *flat], shape, 4 * 18, TOKENS)
    assert sum(budget.slots) <= 4 * 18
    assert budget.slots[2:] == (16, 16)
    assert min(budget.slots[:2]) > 16
    assert budget.predicted_us <= budget.uniform_us
    with pytest.raises(CapacityError, match="63 slots cannot hold 16 experts in each of 4 layers"):
        share_slots([*skewed, *flat], shape, 63, TOKENS)


def test_more_slots_than_any_layer_can_use() -> None:
    budget = share_slots([np.full((2, 4), 10), np.full((2, 4), 10)], EpShape(4, 2, 4), 100, TOKENS)
    assert budget.slots == (4, 4)
    assert num_replicas(static_placement(4, 2)) == 4
