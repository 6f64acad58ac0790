"""Dispatch and combine on real ranks against the plain loop, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeless.engine.dispatch import balanced_ids, moe_reference
from tests.engine import work
from tests.engine.ranks import RankPool


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [([9, 4], 2, 8), ([5, 0], 1, 3), ([0, 0], 2, 4), ([7, 0, 12, 1], 4, 8), ([3, 3, 3, 3], 8, 8)],
)
def test_rows_come_back_as_the_plain_sum(ranks: RankPool, num_tokens: list[int], top_k: int, num_experts: int) -> None:
    for seed in range(3):
        arguments = {"seed": seed, "num_tokens": num_tokens, "top_k": top_k, "num_experts": num_experts}
        results = ranks.run(work.route_rows, len(num_tokens), **arguments)
        for rank, result in enumerate(results):
            tokens = work._tokens(seed, rank, num_tokens[rank], top_k, num_experts)
            expected = moe_reference(*tokens, lambda expert, rows: rows * (expert + 1))
            torch.testing.assert_close(result["out"], expected, rtol=0, atol=0)
            assert result["computed"] == result["shares"]
        computed = np.sum([result["computed"] for result in results])
        assert computed == sum(num_tokens) * top_k


def test_the_lossy_deal_is_even_and_distinct() -> None:
    ids = balanced_ids(torch.zeros(12, 2, dtype=torch.int64), num_experts=8, first=3)
    assert torch.bincount(ids.reshape(-1), minlength=8).tolist() == [3] * 8
    assert all(len(set(row)) == 2 for row in ids.tolist())
