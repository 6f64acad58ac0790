"""Placements made from scratch in well under a millisecond; `portfolio` picks among them.

Legend: E experts, G ranks. `weights_E` is what an expert costs on average, in any unit (time under the cost model).

Once the split knows true counts, connectivity matters more than careful packing. `ring` gives the hottest experts two
replicas and lays the pairs so that they link all ranks into one ring: any rank can then shed load to any other.
"""

from __future__ import annotations

import heapq
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


def ring(weights_E: Sequence[float], shape: EpShape, max_copies: int = 2) -> Placement:
    """Replicated experts in rings over all ranks, the rest packed heaviest first onto what room is left.

    The j-th replicated expert, heaviest first, starts at rank 0, G/2, 1, G/2 + 1, ... and steps 1 rank on for each
    further replica in the first lap over the ranks, 3 in the second, 5 in the third.
    """
    num_ranks = shape.num_ranks
    copies = num_copies(weights_E, shape, max_copies)
    order = sorted(range(len(weights_E)), key=lambda e: (-weights_E[e], e))
    half = (num_ranks + 1) // 2
    starts = [rank for pair in range(half) for rank in (pair, pair + half) if rank < num_ranks]
    room, load = [shape.slots_per_rank] * num_ranks, [0.0] * num_ranks
    hosts: list[list[int]] = [[] for _ in weights_E]
    replicated = [e for e in order if copies[e] > 1]
    for j, expert in enumerate(replicated):
        lap, i = divmod(j, num_ranks)
        rank = starts[i]
        for _ in range(copies[expert]):
            free = [r for r in _around(rank, num_ranks) if room[r] and r not in hosts[expert]]
            if not free:
                break
            hosts[expert].append(free[0])
            room[free[0]] -= 1
            load[free[0]] += weights_E[expert] / copies[expert]
            rank = (free[0] + 1 + 2 * lap) % num_ranks
    _pack([e for e in order if copies[e] == 1], weights_E, hosts, load, room)
    return placement_of(hosts)


def packing(weights_E: Sequence[float], shape: EpShape, max_copies: int = 2) -> Placement:
    """Every replica, heaviest first, to the least loaded rank with room that lacks the expert."""
    copies = num_copies(weights_E, shape, max_copies)
    load, room = [0.0] * shape.num_ranks, [shape.slots_per_rank] * shape.num_ranks
    hosts: list[list[int]] = [[] for _ in weights_E]
    per_copy = [weight / num for weight, num in zip(weights_E, copies, strict=True)]
    for expert in sorted(range(len(copies)), key=lambda e: (-per_copy[e], e)):
        for _ in range(copies[expert]):
            free = [r for r in range(shape.num_ranks) if room[r] and r not in hosts[expert]]
            if not free:
                break
            rank = min(free, key=lambda r: (load[r], r))
            hosts[expert].append(rank)
            room[rank] -= 1
            load[rank] += per_copy[expert]
    return placement_of(hosts)


def _around(rank: int, num_ranks: int) -> list[int]:
    return [*range(rank, num_ranks), *range(rank)]


def _pack(
    experts: Sequence[int], weights_E: Sequence[float], hosts: list[list[int]], load: list[float], room: list[int]
) -> None:
    """One replica of each of `experts` to the least loaded rank with room."""
    heap = [(load[rank], rank) for rank in range(len(load)) if room[rank]]
    heapq.heapify(heap)
    for expert in experts:
        time, rank = heap[0]
        hosts[expert].append(rank)
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(heap, (time + weights_E[expert], rank))
        else:
            heapq.heappop(heap)
