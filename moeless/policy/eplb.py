"""DeepSeek's expert-parallel load balancer (github.com/deepseek-ai/EPLB), as the baseline that production systems use.

Legend: E experts, G ranks, P physical slots (num_slots), in order of node, rank and place on the rank.

It has no memory of the previous plan, so nearly all slots may change, and it may put two copies of one expert on one
rank, which wastes a slot; `EplbPlan.num_duplicates` counts those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import UsageError
from moeless.policy.types import EpShape, Ints, Placement, from_mask


@dataclass(frozen=True)
class EplbPlan:
    """One layer's plan; the slot table is the truth, everything else is derived from it.

    Attributes:
        expert_P: the logical expert in each physical slot.
        num_experts: E.
        num_ranks: G.
    """

    expert_P: Ints
    num_experts: int
    num_ranks: int

    @property
    def copies_E(self) -> Ints:
        """Copies of each expert."""
        return np.bincount(self.expert_P, minlength=self.num_experts)

    @property
    def multiplicity_EG(self) -> Ints:
        """Copies of each expert on each rank."""
        ranks_P = np.arange(len(self.expert_P)) * self.num_ranks // len(self.expert_P)
        flat = np.bincount(self.expert_P * self.num_ranks + ranks_P, minlength=self.num_experts * self.num_ranks)
        return flat.reshape(self.num_experts, self.num_ranks)

    @property
    def num_duplicates(self) -> int:
        """Slots wasted on a second copy of an expert on the same rank."""
        return int(np.maximum(self.multiplicity_EG - 1, 0).sum())

    @property
    def placement(self) -> Placement:
        """The hosts of each expert; copies on the same rank count once."""
        return from_mask(self.multiplicity_EG > 0)


def check_sizes(shape: EpShape) -> None:
    """Raise `UsageError` for sizes that EPLB cannot divide."""
    for whole, part, names in (
        (shape.num_slots, shape.num_ranks, "slots evenly over {1} ranks"),
        (shape.num_experts, shape.num_groups, "experts evenly over {1} groups"),
    ):
        if whole % part:
            raise UsageError(f"eplb cannot divide {whole} {names.format(whole, part)}; choose multiples")


def eplb(loads_E: NDArray[np.generic], shape: EpShape) -> EplbPlan:
    """Plan one layer from its loads (a sum over a window of iterations).

    Groups are kept on one node where they can be divided over the nodes (hierarchical policy); otherwise the global
    policy, which is the same routine with one group and one node.

    Raises:
        UsageError: slots that can't be divided over ranks, or experts over groups.
    """
    check_sizes(shape)
    loads = np.asarray(loads_E, float)
    groups, nodes = shape.num_groups, shape.num_nodes
    if groups % nodes:
        groups, nodes = 1, 1
    group_size = shape.num_experts // groups
    group_loads = loads.reshape(groups, group_size).sum(1)
    groups_of_node = pack(group_loads, nodes)
    slots = []
    for node in range(nodes):
        members = [group * group_size + i for group in groups_of_node[node] for i in range(group_size)]
        chosen, copies = replicate(loads[members], shape.num_slots // nodes)
        per_copy = loads[members][chosen] / copies[chosen]
        for items in pack(per_copy, shape.num_ranks // nodes):
            slots += [members[chosen[item]] for item in items]
    return EplbPlan(np.array(slots, np.int64), shape.num_experts, shape.num_ranks)


def pack(weights: NDArray[np.float64], num_bins: int) -> list[list[int]]:
    """Items into bins of equally many: heaviest first, each to the least loaded bin with room (ties: lowest index)."""
    room = len(weights) // num_bins
    if room == 1:
        return [[item] for item in range(len(weights))]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0.0] * num_bins
    values = weights.tolist()
    for item in np.argsort(-weights, kind="stable").tolist():
        best = load.index(min(load))
        bins[best].append(item)
        load[best] = load[best] + values[item] if len(bins[best]) < room else math.inf
    return bins


def replicate(loads_E: NDArray[np.float64], num_slots: int) -> tuple[list[int], Ints]:
    """The expert of each slot, and copies of each expert: every further slot to the highest load a copy (lowest index).

    The first E slots are experts 0..E-1.
    """
    num_experts = len(loads_E)
    slots = list(range(num_experts))
    copies = np.ones(num_experts, np.int64)
    per_copy: Any = loads_E.copy()
    for _ in range(num_slots - num_experts):
        expert = int(per_copy.argmax())
        slots.append(expert)
        copies[expert] += 1
        per_copy[expert] = loads_E[expert] / copies[expert]
    return slots, copies
