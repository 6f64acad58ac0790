"""The exact integer split: tokens over replicas so that the fullest rank gets as few as possible.

Legend: E experts, G ranks, M movable experts (two or more replicas).

This is a transport problem (max-min load with restricted hosts). Two steps: pour every movable expert over its hosts to
one water level, most tokens first; then push what still stands above the level from rank to rank along augmenting
paths. The level starts at the obvious lower bound and rises only when a set of ranks proves it too low: if nothing can
leave a set S of ranks, the optimum is at least the mean load of S. So it ends at the rounded-up optimum of the linear
programme, and any rank that the replicas link to others can shed load all the way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeless.policy.layout import Layout
from moeless.policy.types import Ints

Rows = list[list[int]]


def balanced(counts_E: Ints, layout: Layout) -> Ints:
    """The split with the least maximum number of tokens on a rank, [E, G]; integers, exact, the same on every rank."""
    layout.check(counts_E)
    base = np.bincount(layout.fixed_rank, weights=counts_E[layout.fixed_E], minlength=layout.num_ranks)
    _, rows, _ = level(base.astype(np.int64).tolist(), counts_E[layout.movable_E].tolist(), layout)
    return layout.shares(counts_E, rows)


def metro(counts_E: Ints, layout: Layout) -> Ints:
    """METRO's problem, exactly: every active expert whole on one replica, as few launches as possible on a rank.

    (arXiv 2512.09277 solves it greedily.) It is `balanced` where an active expert counts as one token.
    """
    layout.check(counts_E)
    tokens = counts_E[layout.movable_E].tolist()
    units = metro_units(counts_E, layout)
    return layout.shares(counts_E, [[n * unit for unit in row] for n, row in zip(tokens, units, strict=True)])


def metro_units(counts_E: Ints, layout: Layout) -> Rows:
    """METRO's choice for the movable experts: 1 at the host that gets the expert, 0 elsewhere."""
    active = counts_E > 0
    base = np.bincount(layout.fixed_rank, weights=active[layout.fixed_E], minlength=layout.num_ranks)
    return level(base.astype(np.int64).tolist(), active[layout.movable_E].astype(np.int64).tolist(), layout)[1]


def level(base: list[int], tokens: list[int], layout: Layout) -> tuple[list[int], Rows, int]:
    """Divide `tokens` [M] over the hosts of `layout` on top of the loads `base` [G].

    Returns loads [G], tokens by movable expert and host, and the level: the proven least maximum load. `base` becomes
    the loads.
    """
    loads = base
    least = max(max(loads), -(-(sum(loads) + sum(tokens)) // layout.num_ranks))
    rows: Rows = [[]] * len(tokens)
    hosts = layout.hosts
    for i in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        pair = hosts[i]
        if len(pair) > 2:
            rows[i] = _pour(tokens[i], pair, loads)
            continue
        g, h = pair
        n = tokens[i]
        twice = n + loads[h] - loads[g]
        k = 0 if twice <= 0 else n if twice >= 2 * n else twice >> 1
        rows[i] = [k, n - k]
        loads[g] += k
        loads[h] += n - k
    while (top := max(loads)) > least:
        least = _push(loads.index(top), loads, rows, layout, least)
    return loads, rows, least


def _pour(tokens: int, ranks: Sequence[int], loads: list[int]) -> list[int]:
    """Tokens over `ranks`, filling the least loaded to one water level; `loads` is updated."""
    order = sorted(range(len(ranks)), key=lambda p: loads[ranks[p]])
    volume, num = tokens, 0
    for p in order:
        height = loads[ranks[p]]
        if num and height * num >= volume:
            break
        volume += height
        num += 1
    height, rest = divmod(volume, num)
    row = [0] * len(ranks)
    for j, p in enumerate(order[:num]):
        rank = ranks[p]
        row[p] = height + (j < rest) - loads[rank]
        loads[rank] += row[p]
    return row


def _push(source: int, loads: list[int], rows: Rows, layout: Layout, least: int) -> int:
    """Push load from `source` along a shortest path to a rank below `least`, or prove that `least` has to rise.

    Returns the level from now on. Breadth first, ranks and experts by index.
    """
    hosts, on_rank = layout.hosts, layout.on_rank
    reached: dict[int, tuple[int, list[int], int, int] | None] = {source: None}
    frontier = [source]
    end = -1
    for u in frontier:
        for i, p in on_rank[u]:
            row = rows[i]
            if row[p]:
                for q, v in enumerate(hosts[i]):
                    if v not in reached:
                        reached[v] = (u, row, p, q)
                        if loads[v] < least:
                            end = v
                            break
                        frontier.append(v)
                if end >= 0:
                    break
        if end >= 0:
            break
    if end < 0:
        return -(-sum([loads[u] for u in frontier]) // len(frontier))
    amount = min(loads[source] - least, least - loads[end])
    path = []
    step = reached[end]
    while step is not None:
        path.append(step)
        amount = min(amount, step[1][step[2]])
        step = reached[step[0]]
    for _, row, p, q in path:
        row[p] -= amount
        row[q] += amount
    loads[source] -= amount
    loads[end] += amount
    return least
