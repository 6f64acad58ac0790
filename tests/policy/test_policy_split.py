from __future__ import annotations

import numpy as np
import pytest
from cases import GPT_OSS_H200, costs, ring_cases, splits
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from moeless.policy.cost import TOKENS, CostModel
from moeless.policy.deal import deal, deal_row
from moeless.policy.flow import balanced, metro
from moeless.policy.layout import Layout
from moeless.policy.roofline import roofline, slowest_us
from moeless.policy.split import even, home, oracle
from moeless.policy.types import EpShape, Placement, as_mask


def least_max_tokens(counts_E: np.ndarray, placement: Placement, num_ranks: int) -> float:
    """The optimum of the linear programme: split tokens over hosts, minimise the largest rank load."""
    pairs = [(e, g) for e, ranks in enumerate(placement) for g in ranks]
    objective = np.r_[np.zeros(len(pairs)), 1.0]
    conserve = np.zeros((len(placement), len(pairs) + 1))
    below = np.zeros((num_ranks, len(pairs) + 1))
    below[:, -1] = -1
    for i, (expert, rank) in enumerate(pairs):
        conserve[expert, i] = below[rank, i] = 1
    found = linprog(objective, A_ub=below, b_ub=np.zeros(num_ranks), A_eq=conserve, b_eq=counts_E, method="highs")
    return float(found.fun)


def least_max_time(counts_E: np.ndarray, placement: Placement, num_ranks: int, cost: CostModel) -> float:
    """The optimum of the roofline split as a mixed-integer programme: tokens, time and an open bit a replica."""
    pairs = [(e, g) for e, ranks in enumerate(placement) for g in ranks]
    num = len(pairs)
    objective = np.r_[np.zeros(3 * num), 1.0]
    rows: list[np.ndarray] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(terms: dict[int, float], at_least: float, at_most: float) -> None:
        row = np.zeros(3 * num + 1)
        for column, factor in terms.items():
            row[column] = factor
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    for i, (expert, _) in enumerate(pairs):
        constrain({i: 1, 2 * num + i: -float(counts_E[expert])}, -np.inf, 0)
        constrain({num + i: 1, i: -cost.alpha_us}, 0, np.inf)
        constrain({num + i: 1, 2 * num + i: -cost.floor_us}, 0, np.inf)
    for expert, count in enumerate(counts_E):
        constrain({i: 1 for i, pair in enumerate(pairs) if pair[0] == expert}, count, count)
    for rank in range(num_ranks):
        on_rank = [i for i, pair in enumerate(pairs) if pair[1] == rank]
        terms = {num + i: 1.0 for i in on_rank} | dict.fromkeys(on_rank, cost.beta_us) | {3 * num: -1.0}
        constrain(terms, -np.inf, 0)
    upper = np.r_[np.full(2 * num, np.inf), np.ones(num), np.inf]
    integral = np.r_[np.ones(num), np.zeros(num), np.ones(num), 0]
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=integral,
        bounds=Bounds(np.zeros(3 * num + 1), upper),
        options={"time_limit": 20.0},
    )
    assert found.status == 0
    return float(found.fun)


def only_on_hosts(shares_EG: np.ndarray, placement: Placement, num_ranks: int) -> bool:
    return bool((shares_EG >= 0).all() and not shares_EG[~as_mask(placement, num_ranks)].any())


@given(splits(), costs())
@settings(max_examples=300, deadline=None)
def test_every_split_conserves_tokens_on_hosts(case: tuple[np.ndarray, Placement, int], cost: CostModel) -> None:
    counts_E, placement, num_ranks = case
    layout = Layout(placement, num_ranks)
    splits = {f.__name__: f(counts_E, layout) for f in (home, even, balanced, metro)}
    splits["roofline"] = roofline(counts_E, layout, cost)
    for name, shares_EG in splits.items():
        assert shares_EG.dtype == np.int64, name
        assert only_on_hosts(shares_EG, placement, num_ranks), name
        assert (shares_EG.sum(1) == counts_E).all(), name
    assert max(slowest_us(counts_E, layout, cost)) == pytest.approx(float(cost.rank_us(splits["roofline"]).max()))
    assert (roofline(counts_E, Layout(placement, num_ranks), cost) == splits["roofline"]).all()


@given(splits())
@settings(max_examples=150, deadline=None)
def test_balanced_is_the_rounded_up_optimum(case: tuple[np.ndarray, Placement, int]) -> None:
    counts_E, placement, num_ranks = case
    largest = balanced(counts_E, Layout(placement, num_ranks)).sum(0).max()
    assert largest == np.ceil(least_max_tokens(counts_E, placement, num_ranks) - 1e-6)
    assert largest <= even(counts_E, Layout(placement, num_ranks)).sum(0).max()


@given(splits())
@settings(max_examples=100, deadline=None)
def test_metro_launches_active_experts_once_and_least_a_rank(case: tuple[np.ndarray, Placement, int]) -> None:
    counts_E, placement, num_ranks = case
    launches_EG = metro(counts_E, Layout(placement, num_ranks)) > 0
    assert (launches_EG.sum(1) == (counts_E > 0)).all()
    active_E = (counts_E > 0).astype(np.int64)
    assert launches_EG.sum(0).max() == np.ceil(least_max_tokens(active_E, placement, num_ranks) - 1e-6)


@given(splits(), costs())
@settings(max_examples=300, deadline=None)
def test_roofline_is_never_worse_than_the_simple_rules(
    case: tuple[np.ndarray, Placement, int], cost: CostModel
) -> None:
    counts_E, placement, num_ranks = case
    layout = Layout(placement, num_ranks)
    ours = float(cost.rank_us(roofline(counts_E, layout, cost)).max())
    for rule in (home, even, metro):
        assert ours <= float(cost.rank_us(rule(counts_E, layout)).max()) * 1.002 + 1e-6, rule.__name__


@pytest.mark.parametrize("sizes", [(32, 8, 40), (64, 8, 80), (256, 64, 320)])
def test_roofline_is_never_worse_on_rings(sizes: tuple[int, int, int]) -> None:
    shape = EpShape(*sizes)
    for counts_E, placement in ring_cases(shape, 40):
        layout = Layout(placement, shape.num_ranks)
        ours = float(GPT_OSS_H200.rank_us(roofline(counts_E, layout, GPT_OSS_H200)).max())
        assert ours >= GPT_OSS_H200.bound_us(counts_E, shape.num_ranks) - 1e-6
        for rule in (home, even, metro):
            assert ours <= float(GPT_OSS_H200.rank_us(rule(counts_E, layout)).max()) * 1.002, rule.__name__


def test_roofline_is_close_to_the_integer_programme() -> None:
    shape = EpShape(12, 4, 16)
    gaps = []
    for counts_E, placement in ring_cases(shape, 12, seed=5):
        counts_E = counts_E // 8
        ours = float(GPT_OSS_H200.rank_us(roofline(counts_E, Layout(placement, 4), GPT_OSS_H200)).max())
        gaps.append(ours / least_max_time(counts_E, placement, 4, GPT_OSS_H200) - 1)
    assert min(gaps) >= -1e-6
    assert np.mean(gaps) <= 0.015
    assert max(gaps) <= 0.09


def test_roofline_opens_a_replica_only_where_it_pays() -> None:
    cost = CostModel(floor_us=10, alpha_us=0.1)
    placement = ((0, 1), (1,))
    few = roofline(np.array([60, 0]), Layout(placement, 2), cost)
    assert sorted(few[0].tolist()) == [0, 60]
    many = roofline(np.array([1000, 0]), Layout(placement, 2), cost)
    assert many[0].tolist() == [500, 500]


def test_floor_zero_balances_tokens_and_alpha_zero_balances_launches() -> None:
    for counts_E, placement in ring_cases(EpShape(32, 8, 40), 10):
        layout = Layout(placement, 8)
        assert (roofline(counts_E, layout, TOKENS) == balanced(counts_E, layout)).all()
        launches_only = CostModel(floor_us=1, alpha_us=0)
        ours = launches_only.rank_us(roofline(counts_E, layout, launches_only)).max()
        assert ours == launches_only.rank_us(metro(counts_E, layout)).max()


def test_extreme_loads() -> None:
    layout = Layout(((0, 1, 2), (1,), (2, 3)), 4)
    nothing = np.zeros(3, np.int64)
    for split in (home, even, balanced, metro, oracle):
        assert not split(nothing, layout).any()
    assert not roofline(nothing, layout, GPT_OSS_H200).any()
    one = np.array([3000, 0, 0])
    assert balanced(one, layout).sum(0).tolist() == [1000, 1000, 1000, 0]
    assert roofline(one, layout, GPT_OSS_H200).sum(0).tolist() == [1000, 1000, 1000, 0]


def test_experts_without_a_replica_are_named() -> None:
    layout = Layout(((0,), (), ()), 2)
    assert balanced(np.array([5, 0, 0]), layout).tolist() == [[5, 0], [0, 0], [0, 0]]
    for split in (home, even, balanced, metro):
        with pytest.raises(ValueError, match=r"experts \[2\] have tokens but no ready replica"):
            split(np.array([5, 0, 1]), layout)


def test_even_spreads_odd_tokens_and_follows_multiplicity() -> None:
    layout = Layout(((0, 1),) * 4, 2)
    assert even(np.array([1, 1, 1, 1]), layout).sum(0).tolist() == [2, 2]
    twice_on_first = np.array([[2, 1]])
    assert even(np.array([9]), Layout(((0, 1),), 2, twice_on_first)).tolist() == [[6, 3]]


def test_oracle_is_even_over_ranks_and_keeps_the_total() -> None:
    shares_EG = oracle(np.array([100, 3, 0, 0]), Layout(((0,), (0,), (1,), (1,)), 2))
    assert shares_EG.sum() == 103
    assert np.ptp(shares_EG.sum(0)) <= 1


@given(splits(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_deal_matches_both_sides_and_keeps_own_tokens(case: tuple[np.ndarray, Placement, int], random: object) -> None:
    counts_E, placement, num_ranks = case
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    counts_SE = np.stack([rng.multinomial(n, np.full(num_ranks, 1 / num_ranks)) for n in counts_E], axis=1)
    shares_EG = balanced(counts_E, Layout(placement, num_ranks))
    dealt_SEG = deal(counts_SE, shares_EG)
    assert (dealt_SEG >= 0).all()
    assert (dealt_SEG.sum(2) == counts_SE).all()
    assert (dealt_SEG.sum(0) == shares_EG).all()
    own = np.minimum(counts_SE, shares_EG.T)
    for rank in range(num_ranks):
        assert (dealt_SEG[rank, :, rank] == own[rank]).all()
        assert (deal_row(counts_SE, shares_EG, rank) == dealt_SEG[rank]).all()
