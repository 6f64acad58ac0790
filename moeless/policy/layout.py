"""A placement compiled for repeated splits: done once a plan, not once an iteration.

Legend: E experts, G ranks, R replicas of all experts, in order of expert and rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeless.policy.types import Ints, Placement


class Layout:
    """Index tables of a placement. Experts with one replica are *fixed*, experts with more are *movable*.

    Attributes:
        movable: the experts with two or more replicas, ascending.
        hosts: their ranks, by position in `movable`.
        on_rank: for each rank the (position in `movable`, position in its hosts) of the movable replicas it holds.
    """

    __slots__ = (
        "fixed_E",
        "fixed_flat",
        "fixed_rank",
        "homeless_E",
        "hosts",
        "movable",
        "movable_E",
        "movable_flat",
        "num_experts",
        "num_ranks",
        "on_rank",
        "placement",
        "share_high_R",
        "share_low_R",
        "share_total_R",
        "slot_expert_R",
        "slot_flat_R",
    )

    def __init__(
        self, placement: Placement, num_ranks: int, multiplicity_EG: NDArray[np.integer] | None = None
    ) -> None:
        """Compile `placement`; `multiplicity_EG` counts copies where one rank may hold several of an expert (EPLB)."""
        self.placement = placement
        self.num_ranks = num_ranks
        self.num_experts = len(placement)
        fixed = [expert for expert, ranks in enumerate(placement) if len(ranks) == 1]
        self.movable = [expert for expert, ranks in enumerate(placement) if len(ranks) > 1]
        self.hosts = [placement[expert] for expert in self.movable]
        self.on_rank: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        for i, ranks in enumerate(self.hosts):
            for position, rank in enumerate(ranks):
                self.on_rank[rank].append((i, position))
        self.fixed_E = np.array(fixed, np.intp)
        self.fixed_rank = np.array([placement[expert][0] for expert in fixed], np.intp)
        self.fixed_flat = self.fixed_E * num_ranks + self.fixed_rank
        self.movable_E = np.array(self.movable, np.intp)
        self.movable_flat = np.array(
            [e * num_ranks + rank for e, ranks in zip(self.movable, self.hosts, strict=True) for rank in ranks], np.intp
        )
        self.homeless_E = np.array([expert for expert, ranks in enumerate(placement) if not ranks], np.intp)
        self._compile_even(multiplicity_EG)

    def _compile_even(self, multiplicity_EG: NDArray[np.integer] | None) -> None:
        """Each replica's interval of its expert's copies, so that even division is two integer divisions."""
        expert_R = np.repeat(np.arange(self.num_experts), [len(ranks) for ranks in self.placement])
        rank_R = np.array([rank for ranks in self.placement for rank in ranks], np.intp)
        copies_R = np.ones(len(expert_R), np.int64)
        if multiplicity_EG is not None:
            copies_R = np.maximum(1, multiplicity_EG[expert_R, rank_R]).astype(np.int64)
        total_E = np.bincount(expert_R, weights=copies_R, minlength=self.num_experts).astype(np.int64)
        before_E = np.cumsum(total_E) - total_E
        self.slot_expert_R = expert_R
        self.slot_flat_R = expert_R * self.num_ranks + rank_R
        self.share_total_R = total_E[expert_R]
        self.share_high_R = np.cumsum(copies_R) - before_E[expert_R]
        self.share_low_R = self.share_high_R - copies_R

    def shares(self, counts_E: Ints, movable_tokens: list[list[int]]) -> Ints:
        """The [E, G] table of a split: fixed experts whole, movable ones as given (by position and host)."""
        shares_EG = np.zeros(self.num_experts * self.num_ranks, np.int64)
        shares_EG[self.fixed_flat] = counts_E[self.fixed_E]
        if movable_tokens:
            shares_EG[self.movable_flat] = [tokens for row in movable_tokens for tokens in row]
        return shares_EG.reshape(self.num_experts, self.num_ranks)

    def check(self, counts_E: Ints) -> None:
        """Raise ValueError when an expert with tokens has no replica: the caller has to add its home first."""
        if len(self.homeless_E) and counts_E[self.homeless_E].any():
            lost = self.homeless_E[counts_E[self.homeless_E] > 0].tolist()
            raise ValueError(f"experts {lost} have tokens but no ready replica; load their homes first")
