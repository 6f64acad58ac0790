from __future__ import annotations

import math

import numpy as np
import pytest

from moeless.errors import UsageError
from moeless.policy.cost import CLUSTERS, MODELS, TOKENS, CostModel, billed_gbs, cost_of, resident_gbs


def test_roofline_of_an_expert() -> None:
    cost = CostModel(floor_us=10, alpha_us=0.1, beta_us=0.01)
    assert cost.expert_us(np.array([0, 1, 100, 1000])).tolist() == pytest.approx([0, 10.01, 11, 110])
    assert cost.floor_tokens == 100
    assert CostModel(floor_us=1, alpha_us=0).floor_tokens == math.inf


def test_layer_time_is_its_slowest_rank_plus_latency() -> None:
    cost = CostModel(floor_us=10, alpha_us=0.1, latency_us=7)
    shares_EG = np.array([[200, 0], [50, 0], [0, 100]])
    assert cost.rank_us(shares_EG).tolist() == [30, 10]
    assert cost.layer_us(shares_EG) == 37
    assert cost.layer_us(np.zeros((3, 2))) == 0


def test_bound_counts_work_and_launches() -> None:
    cost = CostModel(floor_us=10, alpha_us=0.1)
    assert cost.bound_us(np.array([1000, 600, 0, 0]), 4) == 40
    assert cost.bound_us(np.array([1, 1, 1, 0, 0]), 2) == 20
    assert cost.bound_us(np.array([[1000, 600], [1, 0]]), 4) == 25
    assert TOKENS.bound_us(np.array([30, 10]), 4) == 10


def test_bills_by_hand() -> None:
    # 3 replicas of 2 GB for 0.5 s are 3 GB·s; 100 replicas resident for 2 s are 400.
    assert billed_gbs(3, 0.5e6, 2e9) == pytest.approx(3)
    assert resident_gbs(100, 2e6, 2e9) == pytest.approx(400)


def test_data_sheets_give_the_known_roofline() -> None:
    cost = cost_of(MODELS["gpt-oss-20b"], CLUSTERS["8xh200"])
    assert cost.floor_us == pytest.approx(10.37, abs=0.01)
    assert cost.alpha_us == pytest.approx(0.0829, abs=1e-4)
    assert cost.beta_us == pytest.approx(0.0256, abs=1e-4)
    assert cost.copy_us == pytest.approx(778, abs=1)
    mixtral = cost_of(MODELS["mixtral-8x7b"], CLUSTERS["8xa6000"])
    assert mixtral.expert_bytes / 2**30 == pytest.approx(0.33, abs=0.005)
    assert mixtral.copy_us == pytest.approx(5500, abs=10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"floor_us": -1.0}, "floor_us must be a finite number from 0, got -1.0"),
        ({"alpha_us": math.nan}, "alpha_us must be a finite number from 0, got nan"),
        ({"copy_bytes_per_s": 0.0}, "copy_bytes_per_s must be above 0, got 0.0"),
        ({"alpha_us": 0.0}, "at least one of floor_us, alpha_us and beta_us above 0"),
    ],
)
def test_impossible_costs_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CostModel(**values)
