"""The simple divisions of true token counts over ready replicas, and the table of all divisions.

Legend: E experts, G ranks, R replicas. `counts_E` are the tokens of each expert over all source ranks; the result is
the tokens of each expert for each rank, int64 [E, G], with rows that sum to the counts.
"""

from __future__ import annotations

import numpy as np

from moeless.policy.layout import Layout
from moeless.policy.types import Ints


def home(counts_E: Ints, layout: Layout) -> Ints:
    """All tokens of an expert to its first replica."""
    layout.check(counts_E)
    table = layout.even_table
    first_R = table.low_R == 0
    shares_EG = np.zeros(layout.num_experts * layout.num_ranks, np.int64)
    shares_EG[table.flat_R[first_R]] = counts_E[table.expert_R[first_R]]
    return shares_EG.reshape(layout.num_experts, layout.num_ranks)


def even(counts_E: Ints, layout: Layout) -> Ints:
    """The paper's division: each replica the same, give or take one token (section 4.2).

    Odd tokens start at another replica for every expert, so that they do not pile up on the lowest ranks.
    """
    layout.check(counts_E)
    table = layout.even_table
    counts_R, total_R = counts_E[table.expert_R], table.total_R
    turn_R = table.expert_R % total_R
    tokens_R = (counts_R * table.high_R + turn_R) // total_R - (counts_R * table.low_R + turn_R) // total_R
    shares_EG = np.zeros(layout.num_experts * layout.num_ranks, np.int64)
    shares_EG[table.flat_R] = tokens_R
    return shares_EG.reshape(layout.num_experts, layout.num_ranks)


def oracle(counts_E: Ints, layout: Layout) -> Ints:
    """Perfect balance by ignoring the router: every rank the same number of tokens, spread over its first replicas.

    Lossy: rows do not sum to the counts, only the whole does (SGLang calls this `fake`).
    """
    num_ranks = layout.num_ranks
    total = int(counts_E.sum())
    shares_EG = np.zeros((layout.num_experts, num_ranks), np.int64)
    for rank in range(num_ranks):
        tokens = total * (rank + 1) // num_ranks - total * rank // num_ranks
        experts = [e for e, ranks in enumerate(layout.placement) if ranks and ranks[0] == rank] or [0]
        for i, expert in enumerate(experts):
            shares_EG[expert, rank] = tokens * (i + 1) // len(experts) - tokens * i // len(experts)
    return shares_EG


def even_part(tokens: int, position: int, num_hosts: int, expert: int) -> int:
    """What `even` gives the host at `position` of an expert's `num_hosts`, one copy on each."""
    turn = expert % num_hosts
    return (tokens * (position + 1) + turn) // num_hosts - (tokens * position + turn) // num_hosts
