"""Which rank holds which replica, computed alike on every rank from what all of them know.

Inputs are plans, splits, the exchanged states of slots and the shared clock, never a local clock or a local failure. So
no rank has to ask another what it holds, and a rank's `ExpertPool` only carries out what is decided here.

Each rank has the same number of slots for all its layers. A replica that no plan wants any more *lingers* until its
slot is needed or `keep_alive_us` has passed without a token, and is warm at once if it is wanted again. While all
experts fit, an expert's last ready replica is never evicted; when they don't, any replica may be, the least recently
used first.

Scaled to zero, an expert without a token for `keep_alive_us` on any rank leaves all of them, whatever its plan says. It
is *asleep* then: plans go on placing it but nothing is loaded, until it gets a token or is predicted to.

An expert that moves from a full rank to another full rank needs a slot before it frees one. So a further replica of an
expert that is already where it should be never takes a rank's last free slot, and gives way to one that moves.

Legend: L MoE layers, E experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.errors import CapacityError
from moeless.policy.types import Placement, Replica, as_mask

NOT_READY, READY, FAILED = 0, 1, 2
"""States of a slot as they are exchanged."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A replica to drop: (layer, expert) on a rank."""

    layer: int
    expert: int
    rank: int


class Residency:
    """See the module's head.

    Attributes:
        held_LEG: replicas that have a slot: ready, being loaded, or waiting to be.
        ready_LEG: replicas whose weights were there at the last exchange of their layer.
        wanted_LEG: replicas of the current plans.
        asleep_LE: experts of which no replica is held or loaded until `wake`.
        keeps_last: whether all experts fit, so that an expert's last ready replica stays.
        num_refused: loads for which there was no slot to free.
    """

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int) -> None:
        """Raises `CapacityError` when a rank could not even hold its experts of a single layer."""
        least = -(-num_experts // num_ranks) + 1
        if slots_per_rank < least:
            raise CapacityError(
                f"{slots_per_rank} expert slots a rank are too few: one layer needs {least}; give more expert memory"
            )
        shape = (num_layers, num_experts, num_ranks)
        self.slots_per_rank = slots_per_rank
        self.keeps_last = num_ranks * (slots_per_rank - 1) >= num_layers * num_experts
        self.held_LEG: Mask = np.zeros(shape, bool)
        self.ready_LEG: Mask = np.zeros(shape, bool)
        self.wanted_LEG: Mask = np.zeros(shape, bool)
        self.asleep_LE: Mask = np.zeros(shape[:2], bool)
        self.last_used_us_LEG = np.zeros(shape, np.int64)
        self.num_held_G = np.zeros(num_ranks, np.int64)
        self.num_refused = 0

    def want(self, layer: int, placement: Placement) -> None:
        """Make `placement` the plan of `layer`."""
        self.wanted_LEG[layer] = as_mask(placement, len(self.num_held_G))

    def missing(self, layer: int, first: Iterable[Replica] = ()) -> list[Replica]:
        """Wanted replicas of `layer` without a slot: those of `first` in that order, then by expert and rank.

        Those of experts that are asleep are left out.
        """
        todo_EG = self.wanted_LEG[layer] & ~self.held_LEG[layer] & ~self.asleep_LE[layer, :, None]
        if not todo_EG.any():
            return []
        ordered = dict.fromkeys(replica for replica in first if todo_EG[replica])
        ordered.update(dict.fromkeys((int(e), int(g)) for e, g in np.argwhere(todo_EG)))
        return list(ordered)

    def confirm(self, layer: int, states_GE: NDArray[np.integer]) -> list[Replica]:
        """Take in the exchanged slot states of `layer`; replicas that failed to load lose their slot and are given."""
        states_EG = states_GE.T
        self.ready_LEG[layer] = self.held_LEG[layer] & (states_EG == READY)
        if not (states_EG == FAILED).any():
            return []
        failed = [(int(e), int(g)) for e, g in np.argwhere(self.held_LEG[layer] & (states_EG == FAILED))]
        for expert, rank in failed:
            self._release(layer, expert, rank)
        return failed

    def touch(self, layer: int, shares_EG: NDArray[np.integer], now_us: int) -> None:
        """Replicas that get tokens at `now_us` count as used."""
        self.last_used_us_LEG[layer][shares_EG > 0] = now_us

    def admit(
        self, layer: int, expert: int, rank: int, now_us: int, busy: tuple[int, Mask], must: bool = False
    ) -> tuple[bool, Eviction | None]:
        """Give a replica a slot, evicting another if need be.

        Args:
            busy: the layer that is about to run and its replicas [E, G] that may not be evicted.
            must: the layer cannot run without this replica, so any replica that is not busy may go.

        Returns:
            Whether it has a slot, and what has to be dropped for it.
        """
        if self.held_LEG[layer, expert, rank]:
            return True, None
        placed = self.wanted_LEG[layer, expert] & self.held_LEG[layer, expert]
        moves = must or not placed.any()
        eviction = None
        if self.slots_per_rank - self.num_held_G[rank] <= (0 if moves or not self.keeps_last else 1):
            eviction = self._victim(rank, busy, must, moves, layer)
            if eviction is None:
                self.num_refused += 1
                return False, None
            self._release(eviction.layer, eviction.expert, rank)
        self.held_LEG[layer, expert, rank] = True
        self.last_used_us_LEG[layer, expert, rank] = now_us
        self.num_held_G[rank] += 1
        return True, eviction

    def start_clock(self, now_us: int) -> None:
        """Keep-alive begins at `now_us` for all that is held: the clock of another group says nothing here."""
        self.last_used_us_LEG[:] = now_us

    def wake(self, layer: int, experts: int | Mask) -> None:
        """Let experts of `layer` be loaded again: one, or those of a mask [E]."""
        self.asleep_LE[layer, experts] = False

    def expire(self, now_us: int, keep_alive_us: int, *, to_zero: bool = False) -> list[Eviction]:
        """Drop lingering replicas without a token for `keep_alive_us`.

        Args:
            to_zero: drop all replicas of experts without a token anywhere for so long, too; those experts are asleep.
        """
        dropped = []
        stale_LEG = self._lingering() & (self.last_used_us_LEG <= now_us - keep_alive_us)
        for layer, expert, rank in np.argwhere(stale_LEG).tolist():
            if not self.keeps_last or self._elsewhere(self.ready_LEG, rank)[layer, expert]:
                dropped.append(Eviction(layer, expert, rank))
                self._release(layer, expert, rank)
        if to_zero:
            idle_LE = self.last_used_us_LEG.max(2) <= now_us - keep_alive_us
            for layer, expert, rank in np.argwhere(self.held_LEG & idle_LE[:, :, None]).tolist():
                dropped.append(Eviction(layer, expert, rank))
                self._release(layer, expert, rank)
            self.asleep_LE |= idle_LE
        return dropped

    def next_expiry_us(self, keep_alive_us: int, *, to_zero: bool = False) -> int | None:
        """When `expire` has something to drop if no token comes until then; None: never."""
        times_us = self.last_used_us_LEG[self._lingering()]
        if to_zero:
            times_us = np.append(times_us, self.last_used_us_LEG.max(2)[self.held_LEG.any(2)])
        return int(times_us.min()) + keep_alive_us if len(times_us) else None

    def _lingering(self) -> Mask:
        """Replicas [L, E, G] that no plan wants; while all experts fit, those that are not the last ready one."""
        lingering_LEG = self.held_LEG & ~self.wanted_LEG
        if self.keeps_last and lingering_LEG.any():
            lingering_LEG &= self.ready_LEG.sum(2, keepdims=True) - self.ready_LEG > 0
        return lingering_LEG

    def _victim(self, rank: int, busy: tuple[int, Mask], must: bool, moves: bool, layer: int) -> Eviction | None:
        """The least recently used replica that may go for one of `layer`: lingering ones first, then others."""
        free_LE = self.held_LEG[:, :, rank].copy()
        free_LE[busy[0]] &= ~busy[1][:, rank]
        lingering_LE = free_LE & ~self.wanted_LEG[:, :, rank]
        if self.keeps_last:
            choices = [lingering_LE & self._elsewhere(self.ready_LEG, rank)]
            choices += [free_LE & self._elsewhere(self.ready_LEG & self.wanted_LEG, rank)] if moves else []
            choices += [free_LE] if must else []
        else:
            if not must:  # what is fetched ahead for a layer does not drive out what was fetched for it before
                free_LE[layer] = False
            choices = [lingering_LE, free_LE]
        for choice_LE in choices:
            if choice_LE.any():
                age_LE = np.where(choice_LE, self.last_used_us_LEG[:, :, rank], np.iinfo(np.int64).max)
                at, expert = divmod(int(age_LE.argmin()), age_LE.shape[1])
                return Eviction(at, expert, rank)
        return None

    def _elsewhere(self, replicas_LEG: Mask, rank: int) -> Mask:
        """Experts [L, E] with one of `replicas_LEG` on a rank other than `rank`."""
        elsewhere: Mask = replicas_LEG.sum(2) - replicas_LEG[:, :, rank] > 0
        return elsewhere

    def _release(self, layer: int, expert: int, rank: int) -> None:
        self.held_LEG[layer, expert, rank] = self.ready_LEG[layer, expert, rank] = False
        self.num_held_G[rank] -= 1
