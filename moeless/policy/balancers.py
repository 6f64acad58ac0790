"""The one interface between decisions and whoever carries them out: the live engine and the simulator.

Legend: E experts, G ranks.

For every layer of every iteration the caller makes three calls, in this order, and with the same arguments on every
rank, so that every rank decides alike without a leader:

    plan = balancer.plan(iteration, layer, predicted_E, resident)  # as early as the prediction is known; start copies
    shares_EG = balancer.split(layer, counts_E, ready)             # when true counts are known; over *ready* replicas
    balancer.observe(iteration, layer, counts_E, shares_EG)        # after the split: history and drift

A balancer reads no clock and does no I/O; what it knows of the past came through `observe`.
"""

from __future__ import annotations

from typing import Protocol

from moeless.errors import UsageError
from moeless.policy.config import BALANCERS, BalancerConfig
from moeless.policy.cost import CostModel
from moeless.policy.layered import LayeredBalancer
from moeless.policy.types import EpShape, Floats, Ints, LayerPlan, Placement


class Balancer(Protocol):
    """Decides replicas, places and splits for all layers of one model."""

    @property
    def config(self) -> BalancerConfig: ...

    def initial(self, layer: int) -> Placement:
        """The placement to start from, before anything is known: static expert parallelism."""
        ...

    def plan(self, iteration: int, layer: int, predicted_E: Floats | None, resident: Placement) -> LayerPlan:
        """The replicas wanted for `layer` at `iteration`.

        Args:
            predicted_E: predicted token counts, None without a prediction; the true counts if `config.needs_truth`.
            resident: replicas loaded or being loaded now, as every rank knows from the plans made so far.
        """
        ...

    def split(self, layer: int, counts_E: Ints, ready: Placement) -> Ints:
        """Tokens of each expert for each rank, [E, G], from true counts over the ready replicas.

        Every expert with tokens needs a ready replica: the caller adds the home of one that has none (a cold start).
        Rows sum to `counts_E` unless `config.lossy`.
        """
        ...

    def observe(self, iteration: int, layer: int, counts_E: Ints, shares_EG: Ints) -> None:
        """Take in the true counts of an iteration and the split that was made of them."""
        ...


def make_balancer(
    method: str | BalancerConfig, shape: EpShape, num_layers: int, cost: CostModel, slots: tuple[int, ...] | None = None
) -> Balancer:
    """The balancer called `method` (a key of `BALANCERS`) or described by it.

    Args:
        slots: slots of each layer, where they differ (see `budget`); `shape.num_slots` each by default.

    Raises:
        UsageError: an unknown name, or sizes that the method cannot work with.
    """
    if isinstance(method, str) and method not in BALANCERS:
        raise UsageError(f"no balancer is called {method!r}; choose from {', '.join(BALANCERS)}")
    config = BALANCERS[method] if isinstance(method, str) else method
    if slots is not None and len(slots) != num_layers:
        raise UsageError(f"slots are given for {len(slots)} layers, but the model has {num_layers}")
    return LayeredBalancer(config, shape, slots or (shape.num_slots,) * num_layers, cost)
