"""Placements made from scratch in well under a millisecond; `portfolio` picks among them.

Legend: E experts, G ranks. `weights_E` is what an expert costs on average, in any unit (time under the cost model).

Once the split knows true counts, connectivity matters more than careful packing. `ring` gives the hottest experts two
replicas and lays the pairs so that they link all ranks into one ring: any rank can then shed load to any other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from moeless.policy.types import EpShape, Placement, placement_of


def num_copies(weights_E: Sequence[float], shape: EpShape, max_copies: int) -> list[int]:
    """Replicas of each expert: every extra slot to the largest weight a replica (ties: lowest index)."""
    copies = [1] * len(weights_E)
    most = min(max_copies, shape.num_ranks)
    heap = [(-weight, expert) for expert, weight in enumerate(weights_E)] if most > 1 else []
    heapq.heapify(heap)
    for _ in range(shape.num_extra):
        if not heap:
            break
        expert = heap[0][1]
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heapreplace(heap, (-weights_E[expert] / copies[expert], expert))
        else:
            heapq.heappop(heap)
    return copies


def ring(
    weights_E: Sequence[float], shape: EpShape, max_copies: int = 2, resident: Placement | None = None
) -> Placement:
    """Replicated experts in rings over all ranks, the rest packed heaviest first onto what room is left.

    The j-th replicated expert, heaviest first, starts at rank 0, G/2, 1, G/2 + 1, ... and steps 1 rank on for each
    further replica in the first lap over the ranks, 3 in the second, 5 in the third.

    Args:
        resident: replicas that need no copy. The ring is then turned to where most of it is resident, and an expert
            with one replica stays where it is while that rank is not above the mean: the ring evens out the rest.
    """
    copies = num_copies(weights_E, shape, max_copies)
    order = sorted(range(len(weights_E)), key=lambda e: (-weights_E[e], e))
    replicated = [e for e in order if copies[e] > 1]
    turns = range(shape.num_ranks) if resident else range(1)
    rings = [_rings(replicated, copies, shape, turn) for turn in turns]
    laid = rings[0]
    if resident:
        common = [sum(len({*ranks} & {*resident[e]}) for e, ranks in one.items()) for one in rings]
        laid = rings[common.index(max(common))]
    hosts = [laid.get(expert, []) for expert in range(len(weights_E))]
    room, load = [shape.slots_per_rank] * shape.num_ranks, [0.0] * shape.num_ranks
    for expert, ranks in laid.items():
        for rank in ranks:
            room[rank] -= 1
            load[rank] += weights_E[expert] / len(ranks)
    _pack([e for e in order if copies[e] == 1], weights_E, hosts, load, room, resident)
    return placement_of(hosts)


def _rings(replicated: Sequence[int], copies: Sequence[int], shape: EpShape, turn: int) -> dict[int, list[int]]:
    """The hosts of the replicated experts, all turned by `turn` ranks."""
    num_ranks = shape.num_ranks
    half = (num_ranks + 1) // 2
    starts = [rank for pair in range(half) for rank in (pair, pair + half) if rank < num_ranks]
    room = [shape.slots_per_rank] * num_ranks
    hosts: dict[int, list[int]] = {}
    for j, expert in enumerate(replicated):
        lap, i = divmod(j, num_ranks)
        rank = (starts[i] + turn) % num_ranks
        hosts[expert] = []
        for _ in range(copies[expert]):
            free = [r for r in (*range(rank, num_ranks), *range(rank)) if room[r] and r not in hosts[expert]]
            if not free:
                break
            hosts[expert].append(free[0])
            room[free[0]] -= 1
            rank = (free[0] + 1 + 2 * lap) % num_ranks
    return hosts


def packing(weights_E: Sequence[float], shape: EpShape, max_copies: int = 2) -> Placement:
    """Every replica, heaviest first, to the least loaded rank with room that lacks the expert."""
    copies = num_copies(weights_E, shape, max_copies)
    load, room = [0.0] * shape.num_ranks, [shape.slots_per_rank] * shape.num_ranks
    hosts: list[list[int]] = [[] for _ in weights_E]
    per_copy = [weight / num for weight, num in zip(weights_E, copies, strict=True)]
    for expert in sorted(range(len(copies)), key=lambda e: (-per_copy[e], e)):
        for _ in range(copies[expert]):
            rank = load.index(min(load))
            if rank in hosts[expert]:
                rank = min(range(shape.num_ranks), key=lambda r: (r in hosts[expert], load[r], r))
            if not room[rank] or rank in hosts[expert]:
                break
            _put(expert, rank, per_copy[expert], hosts, load, room)
    return placement_of(hosts)


def _pack(
    experts: Sequence[int],
    weights_E: Sequence[float],
    hosts: list[list[int]],
    load: list[float],
    room: list[int],
    resident: Placement | None,
) -> None:
    """One replica of each of `experts`: where it is resident if that stays below the mean, else where load is least."""
    mean = sum(weights_E) / len(load)
    load[:] = [math.inf if not slots else time for time, slots in zip(load, room, strict=True)]
    for expert in experts:
        weight = weights_E[expert]
        warm = [rank for rank in resident[expert] if load[rank] + weight <= mean] if resident else []
        rank = min(warm, key=load.__getitem__) if warm else load.index(min(load))
        _put(expert, rank, weight, hosts, load, room)


def _put(expert: int, rank: int, weight: float, hosts: list[list[int]], load: list[float], room: list[int]) -> None:
    """Place one replica; a rank without room left counts as infinitely loaded."""
    hosts[expert].append(rank)
    room[rank] -= 1
    load[rank] = load[rank] + weight if room[rank] else math.inf
