"""Where replicas go: the paper's Algorithm 2 (section 4.3), and the contiguous rule that ablations compare it with.

Legend: E experts, G ranks.

Replicas are placed in descending load. One that is alive on some rank is reused there (a warm start) while that rank
has room in load; otherwise it joins the shortest queue: the rank with the least load that has a free slot and not yet
this expert. Ties go to the lowest index. "Room in load", which the paper leaves open, is: the rank ends at or below
the mean, or no higher than the shortest queue would.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moeless.policy.types import EpShape, Placement, placement_of, static_placement


def place(
    loads_E: Sequence[float],
    copies_E: Sequence[int],
    shape: EpShape,
    alive: Placement | None = None,
    max_cross_node: int | None = None,
) -> Placement:
    """Place `copies_E` replicas of each expert, loads divided evenly over them.

    A replica beyond the first for which no rank has both a slot and none of the expert is left out.

    Args:
        alive: replicas that can be reused.
        max_cross_node: most replicas put on a node that has no copy of the expert alive, where a copy has to cross
            hosts; further replicas stay on nodes that have one, or are left out (never an expert's first).
    """
    queue = _Queue(shape, sum(loads_E) / shape.num_ranks)
    hosts: list[list[int]] = [[] for _ in loads_E]
    crossings = 0
    order = sorted((-load / max(1, num), e) for e, (load, num) in enumerate(zip(loads_E, copies_E, strict=True)))
    for negative, expert in order:
        load = -negative
        warm = alive[expert] if alive else ()
        near = {shape.node_of(rank) for rank in warm} if shape.num_nodes > 1 and warm else None
        for copy in range(copies_E[expert]):
            rank = queue.warm_rank(load, warm, hosts[expert])
            if rank is None and near is not None:
                rank = queue.near_rank(load, near, hosts[expert])
                if rank is None and copy and max_cross_node is not None and crossings >= max_cross_node:
                    break
                crossings += rank is None
            if rank is None:
                rank = queue.shortest(hosts[expert])
            if rank is None:
                break
            hosts[expert].append(rank)
            queue.add(rank, load)
    return placement_of(hosts)


class _Queue:
    """Ranks by load, with their free slots; entries of the heap that are out of date are dropped when met."""

    def __init__(self, shape: EpShape, mean: float) -> None:
        self.shape = shape
        self.mean = mean
        self.load = [0.0] * shape.num_ranks
        self.room = [shape.slots_per_rank] * shape.num_ranks
        self.heap = [(0.0, rank) for rank in range(shape.num_ranks)]

    def add(self, rank: int, load: float) -> None:
        """Put a replica on `rank`."""
        self.load[rank] += load
        self.room[rank] -= 1
        if self.room[rank]:
            heapq.heappush(self.heap, (self.load[rank], rank))

    def shortest(self, taken: list[int]) -> int | None:
        """The least loaded rank with a free slot that is not in `taken`."""
        passed = []
        found = None
        while self.heap and found is None:
            entry = self.heap[0]
            if not self._valid(entry):
                heapq.heappop(self.heap)
            elif entry[1] in taken:
                passed.append(heapq.heappop(self.heap))
            else:
                found = entry[1]
        for entry in passed:
            heapq.heappush(self.heap, entry)
        return found

    def warm_rank(self, load: float, warm: tuple[int, ...], taken: list[int]) -> int | None:
        """The least loaded of the `warm` ranks that has a slot and room in load."""
        usable = [(self.load[rank], rank) for rank in warm if self.room[rank] and rank not in taken]
        if not usable:
            return None
        least, rank = min(usable)
        return rank if self._has_room(least, load) else None

    def near_rank(self, load: float, nodes: set[int], taken: list[int]) -> int | None:
        """The least loaded rank on `nodes` that has a slot and room in load."""
        ranks = [rank for rank in range(self.shape.num_ranks) if self.shape.node_of(rank) in nodes]
        return self.warm_rank(load, tuple(ranks), taken)

    def _has_room(self, rank_load: float, load: float) -> bool:
        shortest = self.shortest([])
        return rank_load + load <= max(self.mean, load + (0.0 if shortest is None else self.load[shortest]))

    def _valid(self, entry: tuple[float, int]) -> bool:
        return entry[0] == self.load[entry[1]] and self.room[entry[1]] > 0


def place_contiguous(copies_E: Sequence[int], shape: EpShape) -> Placement:
    """Homes as in static expert parallelism, further replicas on the next ranks with a free slot."""
    homes = static_placement(shape.num_experts, shape.num_ranks)
    room = [shape.slots_per_rank] * shape.num_ranks
    hosts = [list(ranks) for ranks in homes]
    for (rank,) in homes:
        room[rank] -= 1
    for expert, num in enumerate(copies_E):
        for step in range(1, shape.num_ranks):
            rank = (homes[expert][0] + step) % shape.num_ranks
            if len(hosts[expert]) < num and room[rank]:
                hosts[expert].append(rank)
                room[rank] -= 1
    return placement_of(hosts)
