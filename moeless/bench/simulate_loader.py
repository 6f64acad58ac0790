"""Which replicas are in memory and when: copies take time, one after the other on each rank.

A copy starts when its rank's copy engine is free and lands beside what is there, so the replica it displaces serves
until the new one is ready, and an expert's last replica is never dropped; the most room this took is reported. Replicas
that are no longer wanted stay warm until their room is needed (keep-alive by capacity).

Legend: L MoE layers, E experts, G ranks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from moeless.policy.types import LayerPlan, Placement, Replica, replicas, slots_used


def usable_replicas(wanted: Placement, warm: Placement) -> Placement:
    """The replicas that tokens may be split over, by the engine's rule: an expert's wanted replicas that are warm.

    Where there is none it is the first of its warm ones that linger, so that it serves until its successor is there.
    """
    if wanted == warm:
        return warm
    return tuple(
        want if want == have else tuple(g for g in want if g in have) or have[:1]
        for want, have in zip(wanted, warm, strict=True)
    )


@dataclass(slots=True)
class LayerReplicas:
    """One layer's replicas. `warm` and `loading` never share a replica; `used` counts the warm ones by rank."""

    wanted: Placement
    warm: list[set[int]]
    used: list[int]
    queued: set[Replica] = field(default_factory=set)
    in_flight: set[Replica] = field(default_factory=set)
    idle: set[Replica] = field(default_factory=set)
    """Copied replicas that have not had a token yet."""
    warm_placement: Placement = ()
    usable: Placement = ()
    complete: bool = False
    """Whether every wanted replica is warm or has been asked for."""

    def refresh(self) -> None:
        self.warm_placement = tuple(tuple(sorted(ranks)) for ranks in self.warm)
        self.usable = usable_replicas(self.wanted, self.warm_placement)


class CopyEngines:
    """The replicas of all layers and the copy engine of every rank.

    Args:
        start: the replicas of each layer that are warm at time 0 (an expert may have none).
        copy_us: time of one copy; 0 makes every copy instant.
        slots_per_rank: replicas of one layer that a rank keeps.
    """

    def __init__(
        self, start: list[Placement], *, wanted: list[Placement], num_ranks: int, copy_us: float, slots_per_rank: int
    ) -> None:
        self.layers = [
            LayerReplicas(wanted=want, warm=[set(ranks) for ranks in warm], used=slots_used(warm, num_ranks))
            for want, warm in zip(wanted, start, strict=True)
        ]
        for layer in self.layers:
            layer.refresh()
        self.copy_us, self.slots_per_rank = copy_us, slots_per_rank
        self.num_copies = 0
        self.num_wasted = 0
        """Copied replicas dropped before they had a single token."""
        self.peak_slots_per_rank = slots_per_rank
        self.num_resident = sum(sum(layer.used) for layer in self.layers)
        self._queues: list[deque[tuple[int, int]]] = [deque() for _ in range(num_ranks)]
        self._current: list[tuple[int, int] | None] = [None] * num_ranks
        self._done_us = [math.inf] * num_ranks
        self._next_done_us = math.inf

    def apply(self, layer: int, plan: LayerPlan, now_us: float) -> None:
        """Make `plan` the wanted replicas: queue what is missing, `plan.copies` first, forget what is not wanted."""
        state = self.layers[layer]
        if plan.placement == state.wanted and state.complete:
            return
        if plan.placement != state.wanted:
            state.wanted = plan.placement
            stale = {(e, g) for e, g in state.queued if g not in plan.placement[e]}
            for expert, rank in stale:
                self._queues[rank].remove((layer, expert))
            state.queued -= stale
            self._make_room(state)
            state.refresh()
        state.complete = True
        there = state.queued | state.in_flight
        for expert, rank in (*plan.copies, *replicas(plan.placement)):
            if rank in state.warm[expert] or (expert, rank) in there:
                continue
            there.add((expert, rank))
            state.queued.add((expert, rank))
            self._queues[rank].append((layer, expert))
            if self._current[rank] is None:
                self._start(rank, now_us)

    def advance(self, now_us: float) -> None:
        """Let time pass: finish the copies that are done by `now_us` and start the next ones."""
        while self._next_done_us <= now_us:
            rank = self._done_us.index(self._next_done_us)
            done_us, current = self._done_us[rank], self._current[rank]
            assert current is not None
            self._finish(*current, rank)
            self._start(rank, done_us)

    def load_now(self, layer: int, expert: int, rank: int, now_us: float) -> float:
        """A cold start: the expert is loaded at once, ahead of the queue, or its copy under way is waited for.

        Returns how long that takes.
        """
        state = self.layers[layer]
        took_us = self.copy_us
        if (expert, rank) in state.in_flight:
            state.in_flight.remove((expert, rank))
            took_us = self._done_us[rank] - now_us
        else:
            self.num_copies += 1
        if (expert, rank) in state.queued:
            state.queued.remove((expert, rank))
            self._queues[rank].remove((layer, expert))
        self._add(state, expert, rank)
        state.refresh()
        return took_us

    def _start(self, rank: int, now_us: float) -> None:
        """Start the oldest copy that waits for this rank's engine."""
        self._current[rank], self._done_us[rank] = None, math.inf
        if self._queues[rank]:
            layer, expert = self._queues[rank].popleft()
            state = self.layers[layer]
            state.queued.remove((expert, rank))
            state.in_flight.add((expert, rank))
            self.num_copies += 1
            self._current[rank], self._done_us[rank] = (layer, expert), now_us + self.copy_us
        self._next_done_us = min(self._done_us)

    def _finish(self, layer: int, expert: int, rank: int) -> None:
        state = self.layers[layer]
        state.in_flight.discard((expert, rank))
        self._add(state, expert, rank)
        self._make_room(state)
        state.refresh()

    def _add(self, state: LayerReplicas, expert: int, rank: int) -> None:
        if rank not in state.warm[expert]:
            state.warm[expert].add(rank)
            state.used[rank] += 1
            state.idle.add((expert, rank))
            self.num_resident += 1

    def _make_room(self, state: LayerReplicas) -> None:
        """Drop unwanted replicas (lowest expert first) from ranks that hold too many; keep every expert's last one."""
        for rank, used in enumerate(state.used):
            if used <= self.slots_per_rank:
                continue
            spare = [
                expert
                for expert, ranks in enumerate(state.warm)
                if rank in ranks and len(ranks) > 1 and rank not in state.wanted[expert]
            ]
            for expert in spare[: used - self.slots_per_rank]:
                state.warm[expert].remove(rank)
                state.used[rank] -= 1
                self.num_resident -= 1
                if (expert, rank) in state.idle:
                    state.idle.remove((expert, rank))
                    self.num_wasted += 1
            self.peak_slots_per_rank = max(self.peak_slots_per_rank, state.used[rank])
