"""A placement compiled for repeated splits: done once a plan, not once an iteration.

Legend: E experts, G ranks, R replicas of all experts, in order of expert and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moeless.policy.types import Ints, Placement


@dataclass(frozen=True)
class EvenTable:
    """Each replica's interval of its expert's copies, so that even division is two integer divisions."""

    expert_R: Ints
    flat_R: Ints
    low_R: Ints
    high_R: Ints
    total_R: Ints


class Layout:
    """Index tables of a placement. Experts with one replica are *fixed*, experts with more are *movable*.

    Attributes:
        fixed_E, fixed_rank: the experts with one replica, ascending, and their ranks.
        movable: the experts with two or more replicas, ascending; `movable_E` as an array.
        hosts: their ranks, by position in `movable`.
        on_rank: for each rank the (position in `movable`, position in its hosts) of the movable replicas it holds.
    """

    def __init__(
        self, placement: Placement, num_ranks: int, multiplicity_EG: NDArray[np.integer] | None = None
    ) -> None:
        """Compile `placement`; `multiplicity_EG` counts copies where one rank may hold several of an expert (EPLB)."""
        self.placement = placement
        self.num_ranks = num_ranks
        self.num_experts = len(placement)
        self._multiplicity_EG = multiplicity_EG
        fixed, fixed_rank, homeless = [], [], []
        self.movable: list[int] = []
        self.hosts: list[tuple[int, ...]] = []
        self.on_rank: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        movable_flat = []
        for expert, ranks in enumerate(placement):
            if len(ranks) == 1:
                fixed.append(expert)
                fixed_rank.append(ranks[0])
            elif ranks:
                for position, rank in enumerate(ranks):
                    self.on_rank[rank].append((len(self.movable), position))
                    movable_flat.append(expert * num_ranks + rank)
                self.movable.append(expert)
                self.hosts.append(ranks)
            else:
                homeless.append(expert)
        self.fixed_E = np.array(fixed, np.intp)
        self.fixed_rank = np.array(fixed_rank, np.intp)
        self.movable_E = np.array(self.movable, np.intp)
        self._fixed_flat = self.fixed_E * num_ranks + self.fixed_rank
        self._movable_flat = np.array(movable_flat, np.intp)
        self._homeless_E = np.array(homeless, np.intp)

    @cached_property
    def even_table(self) -> EvenTable:
        """The tables that dividing evenly needs."""
        expert_R = np.repeat(np.arange(self.num_experts), [len(ranks) for ranks in self.placement])
        rank_R = np.array([rank for ranks in self.placement for rank in ranks], np.int64)
        copies_R = np.ones(len(expert_R), np.int64)
        if self._multiplicity_EG is not None:
            copies_R = np.maximum(1, self._multiplicity_EG[expert_R, rank_R]).astype(np.int64)
        total_E = np.bincount(expert_R, weights=copies_R, minlength=self.num_experts).astype(np.int64)
        high_R = np.cumsum(copies_R) - (np.cumsum(total_E) - total_E)[expert_R]
        return EvenTable(
            expert_R=expert_R,
            flat_R=expert_R * self.num_ranks + rank_R,
            low_R=high_R - copies_R,
            high_R=high_R,
            total_R=total_E[expert_R],
        )

    def shares(self, counts_E: Ints, movable_tokens: list[list[int]]) -> Ints:
        """The [E, G] table of a split: fixed experts whole, movable ones as given (by position and host)."""
        shares_EG = np.zeros(self.num_experts * self.num_ranks, np.int64)
        shares_EG[self._fixed_flat] = counts_E[self.fixed_E]
        if movable_tokens:
            shares_EG[self._movable_flat] = [tokens for row in movable_tokens for tokens in row]
        return shares_EG.reshape(self.num_experts, self.num_ranks)

    def check(self, counts_E: Ints) -> None:
        """Raise ValueError when an expert with tokens has no replica: the caller has to add its home first."""
        if len(self._homeless_E) and counts_E[self._homeless_E].any():
            lost = self._homeless_E[counts_E[self._homeless_E] > 0].tolist()
            raise ValueError(f"experts {lost} have tokens but no ready replica; load their homes first")
