"""What the expert layers have done so far, in numbers that say what elasticity costs and brings.

Two costs are kept side by side. *Billed* is the paper's pay-per-use: a layer's live replicas times that layer's own
time. *Resident* is everything in memory times wall time; who sees only the first will not believe it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

RUNGS = ("predicted", "history", "static", "failed")
"""What a plan was made from; `failed` keeps the placement there was."""


@dataclass
class Meters:
    """Sums over layers and iterations, the same on every rank except for times."""

    iterations: int = 0
    warm: int = 0
    """Replicas that got tokens and were ready before their layer ran."""
    cold: int = 0
    """Experts that had no ready replica anywhere and were loaded while their layer waited."""
    late: int = 0
    """Wanted replicas that were still being loaded when their layer ran, and were left out of its split."""
    copies: int = 0
    """Background loads asked for, over all ranks."""
    evictions: int = 0
    expired: int = 0
    refused: int = 0
    plans: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RUNGS, 0))
    failed_splits: int = 0
    plan_changes: int = 0
    plan_age_sum: int = 0
    """Iterations since the layer's placement last changed, summed over layers and iterations."""
    layers_run: int = 0
    billed_gb_s: float = 0.0
    resident_gb_s: float = 0.0
    last_error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the mean age of plans in iterations."""
        values = asdict(self)
        values["plan_age_mean"] = self.plan_age_sum / max(1, self.layers_run)
        return values
