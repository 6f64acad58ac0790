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
    counts_ES = np.ascontiguousarray(counts_SE.T)
    own_ES = np.minimum(counts_ES, shares_EG)
    start_E1 = (counts_ES[:, :source] - own_ES[:, :source]).sum(1, keepdims=True)
    end_E1 = start_E1 + (counts_ES[:, source] - own_ES[:, source])[:, None]
    open_EG = shares_EG - own_ES
    until_EG = np.cumsum(open_EG, axis=1)
    row_EG: Ints = np.minimum(until_EG, end_E1)
    until_EG -= open_EG
    row_EG -= np.maximum(until_EG, start_E1, out=until_EG)
    np.maximum(row_EG, 0, out=row_EG)
    row_EG[:, source] += own_ES[:, source]
    return row_EG


def deal(counts_SE: Ints, shares_EG: Ints) -> Ints:
    """`deal_row` of every source, [S, E, G]: sums to `counts_SE` over G and to `shares_EG` over S."""
    return np.stack([deal_row(counts_SE, shares_EG, source) for source in range(len(counts_SE))])
