"""How often something took how long: counts by bucket and the sum, as a Prometheus histogram wants them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

LAYER_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.04, 0.08, 0.16, 0.64, 2.5)
"""Upper bounds for whole expert layers; one more bucket holds what is above."""
STAGE_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.5)
"""The same for their parts, which are to take a fraction of a millisecond."""


class Durations:
    """See the module's head."""

    __slots__ = ("_bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = STAGE_BUCKETS_S) -> None:
        """With nothing noted."""
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def note(self, seconds: float) -> None:
        """Once more, and how long it took."""
        self.counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def report(self) -> list[Any]:
        """The counts by bucket and the sum in seconds, in one list."""
        return [*self.counts, self.sum_s]
