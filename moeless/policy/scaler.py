"""How many replicas each expert gets: the paper's Algorithm 1 (section 4.2).

Legend: E experts. Loads are (predicted) token counts and may be fractions.

Readings of ours where the paper is silent: the coefficient of variation (CV) is over replicas of experts with load;
dividing an expert is not monotone in CV, so the best plan seen is returned; an expert has at most one replica a rank;
a replica of one token or less is not divided; an expert without load keeps its one instance.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from moeless.metrics import coefficient_of_variation

# Two CVs this close are the same, whatever the order of their sums.
_CV_TOLERANCE = 1e-9


def scale(
    loads_E: Sequence[float], max_replicas: int, num_ranks: int, cv_threshold: float, min_saving: float = 0.0
) -> list[int]:
    """Replicas of each expert [E].

    Args:
        max_replicas: the layer's budget M_cap, at least E.
        num_ranks: most replicas of one expert.
        cv_threshold: the paper's V; reached, no more replicas are added.
        min_saving: stop when the next replica lowers the largest load of a replica by fewer tokens than this, that is
            when it saves less time than its transfer costs; 0 never stops for that.
    """
    copies = [1] * len(loads_E)
    total = math.fsum(loads_E)
    if total <= 0:
        return copies
    heap = [(-load, expert) for expert, load in enumerate(loads_E) if load > 1 and num_ranks > 1]
    heapq.heapify(heap)
    num_active = sum(load > 0 for load in loads_E)
    squares = math.fsum(load * load for load in loads_E)
    best_cv, best_added = math.inf, 0
    added: list[int] = []
    while True:
        # mean = total / num_active and mean of squares = squares / num_active, for n active replicas.
        cv = math.sqrt(max(0.0, num_active * squares / (total * total) - 1))
        if cv < best_cv - _CV_TOLERANCE:
            best_cv, best_added = cv, len(added)
        if cv <= cv_threshold + _CV_TOLERANCE or not heap or len(copies) + len(added) >= max_replicas:
            break
        per_copy, expert = -heap[0][0], heap[0][1]
        load, num = loads_E[expert], copies[expert] + 1
        if min_saving > 0 and per_copy - max(load / num, _second(heap)) < min_saving:
            break
        copies[expert] = num
        added.append(expert)
        num_active += 1
        squares += load * load / num - load * load / (num - 1)
        if num < num_ranks and load / num > 1:
            heapq.heapreplace(heap, (-load / num, expert))
        else:
            heapq.heappop(heap)
    for expert in added[best_added:]:
        copies[expert] -= 1
    return copies


def _second(heap: list[tuple[float, int]]) -> float:
    """The second largest load in the heap, 0 without one."""
    return -min(heap[1:3])[0] if len(heap) > 1 else 0.0


def scale_reference(
    loads_E: Sequence[float], max_replicas: int, num_ranks: int, cv_threshold: float, min_saving: float = 0.0
) -> list[int]:
    """Algorithm 1 as it reads, everything computed anew in each round; `scale` must equal it."""
    loads = np.asarray(loads_E, float)
    copies = np.ones(len(loads), int)
    best_cv, best = math.inf, copies.copy()
    while loads.sum() > 0:
        per_replica = np.repeat(loads / copies, copies)
        cv = float(coefficient_of_variation(per_replica[per_replica > 0]))
        if cv < best_cv - _CV_TOLERANCE:
            best_cv, best = cv, copies.copy()
        may_grow = (copies < num_ranks) & (loads / copies > 1)
        if cv <= cv_threshold + _CV_TOLERANCE or not may_grow.any() or copies.sum() >= max_replicas:
            break
        candidates = np.where(may_grow, loads / copies, -1.0)
        expert = int(candidates.argmax())
        after = candidates.copy()
        after[expert] = loads[expert] / (copies[expert] + 1)
        if min_saving > 0 and candidates.max() - after.max() < min_saving:
            break
        copies[expert] += 1
    return [int(c) for c in best]
