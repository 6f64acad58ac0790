from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases import GPT_OSS_H200, layers
from hypothesis import given, settings
from hypothesis import strategies as st

from moeless.errors import UsageError
from moeless.policy.balancers import Balancer, make_balancer
from moeless.policy.config import BALANCERS, COMBINATIONS, BalancerConfig
from moeless.policy.cost import TOKENS, CostModel
from moeless.policy.types import EpShape, LayerPlan, check_placement

SHAPE = EpShape(16, 4, 20)
NAMES = list(BALANCERS)


def traffic(num: int, num_tokens: int, seed: int, num_experts: int = 16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    popularity = rng.gamma(0.7, 1, num_experts) + 1e-3
    return rng.multinomial(num_tokens, popularity / popularity.sum(), size=num).astype(np.int64)


def replay(
    balancer: Balancer, counts_IE: np.ndarray, predict: bool = True, start: int = 0
) -> tuple[list[LayerPlan], list[np.ndarray]]:
    """Layer 0 of an ideal engine: copies are done at once. Returns the plans and the shares."""
    resident = balancer.initial(0)
    plans, splits = [], []
    for i, counts_E in enumerate(counts_IE):
        plan = balancer.plan(start + i, 0, counts_E.astype(float) if predict else None, resident)
        resident = plan.placement
        shares_EG = balancer.split(0, counts_E, resident)
        balancer.observe(start + i, 0, counts_E, shares_EG)
        plans.append(plan)
        splits.append(shares_EG)
    return plans, splits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("predict", [True, False])
def test_all_balancers_conserve_tokens_and_repeat_themselves(name: str, predict: bool) -> None:
    counts_IE = traffic(40, 600, seed=1)
    plans, splits = replay(make_balancer(name, SHAPE, 2, GPT_OSS_H200), counts_IE, predict)
    again, splits_again = replay(make_balancer(name, SHAPE, 2, GPT_OSS_H200), counts_IE, predict)
    assert plans == again
    for plan, counts_E, shares_EG, same in zip(plans, counts_IE, splits, splits_again, strict=True):
        check_placement(plan.placement, SHAPE)
        assert (shares_EG == same).all()
        assert shares_EG.sum() == counts_E.sum()
        if not BALANCERS[name].lossy:
            assert (shares_EG.sum(1) == counts_E).all()


@pytest.mark.parametrize("name", NAMES)
def test_unchanged_loads_move_nothing(name: str) -> None:
    counts_IE = np.repeat(traffic(1, 600, seed=2), 100, axis=0)
    plans, _ = replay(make_balancer(name, SHAPE, 1, GPT_OSS_H200), counts_IE)
    assert all(plan.copies == () for plan in plans[70:])


@given(layers(), st.sampled_from(NAMES), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_sizes_work_or_are_refused(case: tuple[list[int], EpShape], name: str, predict: bool) -> None:
    loads, shape = case
    if BALANCERS[name].place == "eplb" and shape.num_slots % shape.num_ranks:
        with pytest.raises(UsageError, match="eplb cannot divide"):
            make_balancer(name, shape, 1, GPT_OSS_H200)
        return
    counts_IE = np.array([loads, loads[::-1], [0] * len(loads), loads] * 6)
    plans, splits = replay(make_balancer(name, shape, 1, GPT_OSS_H200), counts_IE, predict)
    for plan, counts_E, shares_EG in zip(plans, counts_IE, splits, strict=True):
        check_placement(plan.placement, shape)
        assert shares_EG.sum() == counts_E.sum()


def test_copies_are_what_is_missing_with_the_hottest_first() -> None:
    balancer = make_balancer("moeless", SHAPE, 1, TOKENS)
    loads = np.array([400, 10, 10, 10, 10, 10, 10, 10, 300, 10, 10, 10, 10, 10, 10, 10], float)
    plan = balancer.plan(0, 0, loads, balancer.initial(0))
    assert plan.copies
    per_copy = [loads[e] / len(plan.placement[e]) for e, _ in plan.copies]
    assert per_copy == sorted(per_copy, reverse=True)
    assert plan.copies[0][0] in (0, 8)
    assert all(rank in plan.placement[e] for e, rank in plan.copies)
    assert all(rank not in plan.placement[e] for e, rank in plan.drops)
    again = balancer.plan(1, 0, loads, balancer.initial(0))
    assert set(again.copies) == set(plan.copies)


def test_eplb_plans_at_a_quarter_and_then_every_interval() -> None:
    counts_IE = np.concatenate([traffic(40, 2000, seed=s) for s in range(5)])
    plans, _ = replay(make_balancer("eplb", SHAPE, 1, TOKENS), counts_IE)
    changed = [i for i, plan in enumerate(plans) if plan.copies]
    assert changed
    assert set(changed) <= {16, 80, 144}


def test_static_and_balanced_loads_need_nothing() -> None:
    counts_IE = np.full((60, 16), 50)
    for name in ("static", "moeless", "moeless-roofline"):
        plans, _ = replay(make_balancer(name, SHAPE, 1, GPT_OSS_H200), counts_IE)
        assert all(plan.copies == () for plan in plans), name


def test_roofline_finds_skew_stops_planning_and_answers_drift() -> None:
    rng = np.random.default_rng(3)
    popularity = 0.75 ** np.arange(16)
    before = rng.multinomial(4000, popularity / popularity.sum(), size=120).astype(np.int64)
    # The coldest experts become the hottest.
    after = before[:60, ::-1]
    balancer = make_balancer("moeless-roofline", SHAPE, 1, GPT_OSS_H200)
    plans, splits = replay(balancer, np.concatenate([before, after]), predict=False)
    counts_IE = np.concatenate([before, after])
    ratios = np.array(
        [
            GPT_OSS_H200.rank_us(shares_EG).max() / GPT_OSS_H200.bound_us(counts_E, 4)
            for shares_EG, counts_E in zip(splits, counts_IE, strict=True)
        ]
    )
    assert ratios[:2].mean() > 1.2
    assert ratios[60:120].mean() < 1.03
    assert sum(len(plan.copies) for plan in plans[60:120]) <= 4
    assert ratios[120:122].min() > 1.2
    assert ratios[130:].mean() < 1.05


def test_copies_too_dear_to_pay_are_not_made() -> None:
    slow = dataclasses.replace(GPT_OSS_H200, copy_bytes_per_s=1.0)
    plans, _ = replay(make_balancer("moeless-roofline", SHAPE, 1, slow), traffic(60, 4000, seed=5))
    assert all(plan.copies == () for plan in plans)


def test_a_prediction_is_enough_to_start_with() -> None:
    balancer = make_balancer("moeless-roofline", SHAPE, 1, TOKENS)
    counts_E = traffic(1, 4000, seed=6)[0]
    plan = balancer.plan(2, 0, counts_E.astype(float), balancer.initial(0))
    assert plan.copies
    shares_EG = balancer.split(0, counts_E, plan.placement)
    assert shares_EG.sum(0).max() <= 1.01 * 4000 / 4


def test_bound_is_planned_from_the_truth() -> None:
    counts_IE = traffic(20, 4000, seed=7)
    balancer = make_balancer("bound", SHAPE, 1, TOKENS)
    assert balancer.config.needs_truth
    _, splits = replay(balancer, counts_IE)
    assert max(shares_EG.sum(0).max() for shares_EG in splits) <= 1.01 * 1000


@pytest.mark.parametrize(("scale", "place"), sorted(COMBINATIONS))
def test_ablations_are_data(scale: str, place: str) -> None:
    config = dataclasses.replace(
        BALANCERS["moeless"], loads="history", scale=scale, place=place, split="balanced", interval=4
    )
    plans, splits = replay(make_balancer(config, SHAPE, 1, GPT_OSS_H200), traffic(20, 600, seed=8))
    assert all((shares_EG.sum() == 600) for shares_EG in splits)
    assert (num_moved := sum(len(plan.copies) for plan in plans)) == 0 or scale != "none" or place != "static", (
        num_moved
    )


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(UsageError, match="scale 'cv' cannot be combined with place 'eplb'"):
        BalancerConfig(loads="history", scale="cv", place="eplb", split="even")
    with pytest.raises(UsageError, match="scale 'cv' needs loads to plan from"):
        BalancerConfig(loads="none", scale="cv", place="warm", split="even")
    with pytest.raises(UsageError, match="no balancer is called 'best'; choose from static, eplb"):
        make_balancer("best", SHAPE, 1, TOKENS)
    with pytest.raises(UsageError, match="slots are given for 2 layers, but the model has 3"):
        make_balancer("static", SHAPE, 3, TOKENS, slots=(16, 16))


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_number_of_experts_a_token(top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    routes_TK = np.stack([rng.permutation(16)[:top_k] for _ in range(50)])
    counts_IE = np.repeat(np.bincount(routes_TK.ravel(), minlength=16)[None], 20, axis=0)
    for name in NAMES:
        _, splits = replay(make_balancer(name, SHAPE, 1, GPT_OSS_H200), counts_IE)
        assert all(shares_EG.sum() == 50 * top_k for shares_EG in splits), name


def test_layers_may_have_different_slots() -> None:
    balancer = make_balancer("moeless-roofline", SHAPE, 2, TOKENS, slots=(16, 24))
    loads = traffic(1, 4000, seed=9)[0].astype(float)
    for layer, most in ((0, 16), (1, 24)):
        plan = balancer.plan(9, layer, loads, balancer.initial(layer))
        check_placement(plan.placement, EpShape(16, 4, most))


def test_history_is_bounded() -> None:
    balancer = make_balancer("eplb", EpShape(4, 2, 4), 1, CostModel())
    replay(balancer, np.full((500, 4), 3))
    assert len(balancer._states[0].window) == 64  # type: ignore[attr-defined]
