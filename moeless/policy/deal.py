"""Who sends what to whom: a split dealt to the ranks that the tokens come from.

Legend: S source ranks, E experts, G destination ranks (S = G in expert parallelism).

Every rank keeps its own tokens where it may; what is left over is matched in rank order on both sides (the overlap of
two intervals of one line), so all ranks agree without talking.
"""

from __future__ import annotations

import numpy as np

from moeless.policy.types import Ints


def deal_row(counts_SE: Ints, shares_EG: Ints, source: int) -> Ints:
    """Tokens that rank `source` sends of each expert to each rank, [E, G]; rows sum to its own counts.

    `shares_EG` has to divide exactly the column sums of `counts_SE`.
    """
    own_SE = np.minimum(counts_SE, shares_EG.T)
    left_SE = counts_SE - own_SE
    open_EG = shares_EG - own_SE.T
    start_E = left_SE[:source].sum(0)
    end_E = start_E + left_SE[source]
    until_EG = np.cumsum(open_EG, axis=1)
    row_EG = np.minimum(until_EG, end_E[:, None]) - np.maximum(until_EG - open_EG, start_E[:, None])
    np.maximum(row_EG, 0, out=row_EG)
    row_EG[:, source] += own_SE[source]
    result: Ints = row_EG
    return result


def deal(counts_SE: Ints, shares_EG: Ints) -> Ints:
    """`deal_row` of every source, [S, E, G]: sums to `counts_SE` over G and to `shares_EG` over S."""
    return np.stack([deal_row(counts_SE, shares_EG, source) for source in range(len(counts_SE))])
