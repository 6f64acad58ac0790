"""What a plan is made of: which ranks hold a replica of which expert, under which limits.

Legend: E logical experts of a layer, G ranks. A rank here is a GPU or, on CPU, a process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.errors import CapacityError, UsageError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# For each logical expert its hosts: ascending ranks, each at most once. The first is the expert's home, which loads it
# when no replica is ready (a cold start).
Placement = tuple[tuple[int, ...], ...]

# One replica: (expert, rank).
Replica = tuple[int, int]


@dataclass(frozen=True)
class EpShape:
    """Sizes of one expert-parallel MoE layer; the same for all layers of a model.

    Attributes:
        num_experts: E, logical experts.
        num_ranks: G.
        num_slots: room for replicas of one layer over all ranks (the paper's M_cap, in experts).
        num_groups: expert groups of the router (DeepSeek's group-limited routing), for hierarchical EPLB.
        num_nodes: hosts that the ranks are divided over, contiguously and evenly.

    Raises:
        UsageError: a size below 1, or ranks that can't be divided over the nodes.
        CapacityError: fewer slots than experts: every expert needs a home.
    """

    num_experts: int
    num_ranks: int
    num_slots: int
    num_groups: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_ranks", "num_groups", "num_nodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_slots < self.num_experts:
            raise CapacityError(
                f"{self.num_slots} slots a layer cannot hold {self.num_experts} experts; give each at least one slot"
            )
        if self.num_ranks % self.num_nodes:
            raise UsageError(f"{self.num_ranks} ranks cannot be divided evenly over {self.num_nodes} nodes")

    @property
    def slots_per_rank(self) -> int:
        """Most replicas of a layer that one rank holds: the slots divided over the ranks, rounded up."""
        return -(-self.num_slots // self.num_ranks)

    @property
    def num_extra(self) -> int:
        """Slots beyond one an expert."""
        return self.num_slots - self.num_experts

    def node_of(self, rank: int) -> int:
        """The node that `rank` is on."""
        return rank * self.num_nodes // self.num_ranks


@dataclass(frozen=True)
class LayerPlan:
    """What a balancer wants of one layer from now on.

    Attributes:
        placement: the replicas wanted.
        copies: replicas of `placement` that are not resident yet, the most useful first: load them in this order.
        drops: resident replicas that are not wanted any more; they may stay until their room is needed.
    """

    placement: Placement
    copies: tuple[Replica, ...] = ()
    drops: tuple[Replica, ...] = ()


def static_placement(num_experts: int, num_ranks: int) -> Placement:
    """Static expert parallelism: one replica each, expert e on rank floor(e G / E) (Megatron-LM's layout)."""
    return tuple((expert * num_ranks // num_experts,) for expert in range(num_experts))


def placement_of(hosts: Iterable[Iterable[int]]) -> Placement:
    """Hosts in any order as a `Placement`; repeated ranks count once."""
    return tuple(tuple(sorted({int(rank) for rank in ranks})) for ranks in hosts)


def replicas(placement: Placement) -> list[Replica]:
    """All replicas, by expert and then by rank."""
    return [(expert, rank) for expert, ranks in enumerate(placement) for rank in ranks]


def num_replicas(placement: Placement) -> int:
    """Slots in use over all ranks."""
    return sum(map(len, placement))


def slots_used(placement: Placement, num_ranks: int) -> list[int]:
    """Replicas on each rank [G]."""
    used = [0] * num_ranks
    for ranks in placement:
        for rank in ranks:
            used[rank] += 1
    return used


def experts_on(placement: Placement, rank: int) -> list[int]:
    """Experts with a replica on `rank`, ascending."""
    return [expert for expert, ranks in enumerate(placement) if rank in ranks]


def as_mask(placement: Placement, num_ranks: int) -> NDArray[np.bool_]:
    """True where an expert has a replica on a rank [E, G]."""
    mask = np.zeros((len(placement), num_ranks), bool)
    for expert, ranks in enumerate(placement):
        mask[expert, list(ranks)] = True
    return mask


def from_mask(mask_EG: NDArray[np.bool_]) -> Placement:
    """The inverse of `as_mask`."""
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in mask_EG)


def moves(old: Placement, new: Placement) -> tuple[list[Replica], list[Replica]]:
    """Replicas of `new` that `old` lacks (to copy) and of `old` that `new` lacks (to drop), by expert and rank."""
    copies, drops = [], []
    for expert, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            copies += [(expert, rank) for rank in after if rank not in before]
            drops += [(expert, rank) for rank in before if rank not in after]
    return copies, drops


def check_placement(placement: Placement, shape: EpShape) -> None:
    """Raise `CapacityError` unless every expert has a home, hosts ascend, and ranks and slots are within `shape`."""
    if len(placement) != shape.num_experts:
        raise CapacityError(f"a placement of {len(placement)} experts does not fit a layer of {shape.num_experts}")
    for expert, ranks in enumerate(placement):
        if not ranks:
            raise CapacityError(f"expert {expert} has no replica on any rank")
        if list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= shape.num_ranks:
            raise CapacityError(f"expert {expert} has hosts {ranks}, not ascending ranks below {shape.num_ranks}")
    if num_replicas(placement) > shape.num_slots:
        raise CapacityError(f"{num_replicas(placement)} replicas exceed the layer's {shape.num_slots} slots")
    for rank, used in enumerate(slots_used(placement, shape.num_ranks)):
        if used > shape.slots_per_rank:
            raise CapacityError(f"rank {rank} would hold {used} replicas but has {shape.slots_per_rank} slots")
