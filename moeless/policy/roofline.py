"""The split that minimises the *time* of the slowest rank: tokens go to a replica only where that pays.

Legend: E experts, G ranks, M movable experts (two or more replicas).

A rank pays for x > 0 tokens of an expert max(floor, alpha x) + beta x, so opening a further replica costs a floor. The
problem is then no longer a flow; but its two ends are, and both are solved exactly (`flow.level`): experts below the
floor are launches to be spread (METRO's problem), experts above it are tokens. That start, or a greedy one that opens
few replicas, is repaired rank by rank; work ends as soon as a proven lower bound is reached. At the end the simple
rules on the same replicas (METRO, even, home) are priced where they could still win, so the result is never worse
than any of them by more than `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeless.policy.cost import CostModel
from moeless.policy.flow import Rows, balanced, level, metro_units
from moeless.policy.layout import Layout
from moeless.policy.refit import Refit
from moeless.policy.split import even_part
from moeless.policy.types import Floats, Ints

# A split this close to a lower bound is good enough.
TOLERANCE = 0.002

# Most experts taken off their ranks and put back in the hot path.
REPAIRS = 12


def roofline(counts_E: Ints, layout: Layout, cost: CostModel, repairs: int = REPAIRS) -> Ints:
    """Tokens of each expert for each rank [E, G] with the least modelled time of the slowest rank found.

    Args:
        repairs: bound on the local search; more is slower and slightly better.
    """
    if cost.floor_us == 0:
        return balanced(counts_E, layout)
    layout.check(counts_E)
    _, rows = solve(counts_E, layout, cost, repairs)
    return layout.shares(counts_E, rows)


def slowest_us(counts_E: Ints, layout: Layout, cost: CostModel, repairs: int = REPAIRS) -> list[float]:
    """The time of each rank [G] under `roofline`, without making the table: what placements are priced by."""
    unit = cost.alpha_us + cost.beta_us
    if cost.floor_us == 0:
        base = np.bincount(layout.fixed_rank, weights=counts_E[layout.fixed_E], minlength=layout.num_ranks)
        loads, _, _ = level(base.astype(np.int64).tolist(), counts_E[layout.movable_E].tolist(), layout)
        return [unit * tokens for tokens in loads]
    return solve(counts_E, layout, cost, repairs)[0]


def solve(counts_E: Ints, layout: Layout, cost: CostModel, repairs: int) -> tuple[list[float], Rows]:
    """Times of the ranks [G], and tokens by movable expert and host."""
    floor, alpha, beta = cost.floor_us, cost.alpha_us, cost.beta_us
    compute_E = np.maximum(alpha * counts_E, floor)
    compute_E *= counts_E > 0
    time_E = compute_E + beta * counts_E
    base = np.bincount(layout.fixed_rank, weights=time_E[layout.fixed_E], minlength=layout.num_ranks).tolist()
    tokens: list[int] = counts_E[layout.movable_E].tolist()
    whole: list[float] = time_E[layout.movable_E].tolist()
    launches = -(-int(np.count_nonzero(counts_E)) // layout.num_ranks)
    bound = max(max(base), (sum(base) + sum(whole)) / layout.num_ranks, launches * floor)
    search = Refit(base, tokens, layout, floor, alpha, beta, bound)
    big = [alpha * n > floor for n in tokens]
    units = metro_units(counts_E, layout) if not all(big) else None
    rows, proven = _flow_start(search, compute_E, big, units)
    search.take(rows)
    stop = max(bound, proven) * (1 + TOLERANCE)
    if search.slowest() > stop and any(big):
        search.take_if_better(search.greedy())
    if search.slowest() > stop and repairs:
        search.repair(stop, repairs)
    if search.slowest() > stop:
        _try_simple_rules(search, counts_E, whole, units)
    return search.times, search.rows


def _flow_start(search: Refit, compute_E: Floats, big: list[bool], units: Rows | None) -> tuple[Rows, float]:
    """Small experts whole, where METRO's exact spread of launches has them; big ones on top, tokens spread exactly.

    Returns rows, and a lower bound of the slowest rank's time that the flow proves (0 if none).
    """
    tokens, layout = search.tokens, search.layout
    num_big = sum(big)
    proven = 0.0
    if units is None:
        rows: Rows = [[0] * len(ranks) for ranks in layout.hosts]
    else:
        rows = [[n * unit for unit in row] for n, row in zip(tokens, units, strict=True)]
    if num_big:
        for i, is_big in enumerate(big):
            if is_big:
                rows[i] = [0] * len(rows[i])
        per_token = search.alpha + search.beta
        below = [int(time / per_token) for time in search.priced(rows)]
        movable = [n if is_big else 0 for n, is_big in zip(tokens, big, strict=True)]
        _, parts, least = level(below, movable, layout)
        rows = [part if is_big else row for part, row, is_big in zip(parts, rows, big, strict=True)]
        if num_big == len(big):
            proven = (least - 1) * per_token
    return rows, proven


def _try_simple_rules(search: Refit, counts_E: Ints, whole: list[float], units: Rows | None) -> None:
    """Take the even, home-only or METRO's split if it is better than what was found."""
    layout, tokens = search.layout, search.tokens
    rules: list[Callable[[int, int], int]] = [
        lambda i, p: even_part(tokens[i], p, len(layout.hosts[i]), layout.movable[i]),
    ]
    # Whole experts can't win when one of them takes longer even on the emptiest of its hosts.
    slowest = search.slowest()
    if all(
        time + min([search.base[rank] for rank in ranks]) < slowest
        for time, ranks in zip(whole, layout.hosts, strict=True)
    ):
        chosen = units or metro_units(counts_E, layout)
        rules += [lambda i, p: 0 if p else tokens[i], lambda i, p: tokens[i] * chosen[i][p]]
    for rule in rules:
        if search.could_beat(rule):
            search.take([[rule(i, p) for p in range(len(ranks))] for i, ranks in enumerate(layout.hosts)])
