"""The balancers as data: what each takes its loads from, and how it scales, places and splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeless.errors import UsageError

Loads = Literal["none", "history", "predicted", "true"]
Scale = Literal["none", "eplb", "cv", "time"]
Place = Literal["static", "eplb", "warm", "portfolio"]
Split = Literal["home", "even", "balanced", "roofline", "metro", "oracle"]

# Which ways of scaling and placing fit together.
COMBINATIONS = {
    ("none", "static"),
    ("none", "warm"),
    ("cv", "static"),
    ("cv", "warm"),
    ("eplb", "static"),
    ("eplb", "warm"),
    ("eplb", "eplb"),
    ("time", "portfolio"),
}


@dataclass(frozen=True)
class BalancerConfig:
    """One balancer; the ablations of the paper's section 6.5 are `dataclasses.replace` of one of these.

    Attributes:
        loads: what plans are made from: nothing, the counts observed, the predicted counts (the history stands in for
            a layer without a prediction), or the true counts of the iteration itself (the caller hands them in as
            the prediction).
        scale: replicas of an expert: always one, EPLB's greedy use of all slots, the paper's Algorithm 1, or what
            lowers the modelled time.
        place: contiguous (further replicas on the next ranks), EPLB's packing, the paper's Algorithm 2, or the best of
            a portfolio.
        split: tokens over the ready replicas: all to the first, even, exact least maximum load, least modelled time
            of the slowest rank, METRO's least number of launches, or ignoring the router altogether (lossy).
        window: iterations of history that count.
        interval: iterations between plans; 0 plans whenever asked.
        num_samples: iterations of the window that a placement is priced on.
        cv_threshold: the paper's V.
        stop_when_unprofitable: add no replica that saves less time than its transfer costs (off in the paper).
        horizon: least number of iterations over which a copy has to earn its transfer.
        copy_price: the share of a copy's time that it costs the iteration it runs beside.
        min_gain: least relative gain of a step worth making.
        num_errors: standard errors over the samples that a step has to gain.
        drift: relative excess of an iteration's time over what the plan promised that is still taken for noise; more
            of it, several iterations long, calls for a new plan at once.
    """

    loads: Loads
    scale: Scale
    place: Place
    split: Split
    window: int = 64
    interval: int = 0
    num_samples: int = 16
    cv_threshold: float = 0.2
    stop_when_unprofitable: bool = False
    horizon: float = 200.0
    copy_price: float = 0.05
    min_gain: float = 0.003
    num_errors: float = 1.0
    drift: float = 0.05

    def __post_init__(self) -> None:
        if self.window < 1 or self.interval < 0 or self.num_samples < 1:
            raise UsageError(
                f"a balancer needs window >= 1, interval >= 0 and num_samples >= 1, "
                f"got {self.window}, {self.interval} and {self.num_samples}"
            )
        if (self.scale, self.place) not in COMBINATIONS:
            raise UsageError(f"scale {self.scale!r} cannot be combined with place {self.place!r}")
        if self.loads == "none" and self.scale != "none":
            raise UsageError(f"scale {self.scale!r} needs loads to plan from")

    @property
    def lossy(self) -> bool:
        """True when tokens do not go to the experts their router chose."""
        return self.split == "oracle"

    @property
    def needs_truth(self) -> bool:
        """True for a bound rather than a method: `plan` is given the iteration's true counts as its prediction, and
        its copies are to be taken as done at once.
        """
        return self.loads == "true"


BALANCERS = {
    # Megatron-LM-style contiguous expert parallelism.
    "static": BalancerConfig(loads="none", scale="none", place="static", split="home"),
    # DeepSeek's EPLB on a windowed history (windows as in vLLM, shortened so that a test trace sees several plans).
    "eplb": BalancerConfig(loads="history", scale="eplb", place="eplb", split="even", window=64, interval=64),
    # METRO (arXiv 2512.09277): EPLB's replicas, each active expert launched on one of them only.
    "metro": BalancerConfig(loads="history", scale="eplb", place="eplb", split="metro", window=64, interval=64),
    # Perfect balance by ignoring the router: lossy, a reference only.
    "oracle": BalancerConfig(loads="none", scale="none", place="static", split="oracle"),
    # The lossless bound: planned and split from the true loads of the iteration itself, copies free.
    "bound": BalancerConfig(
        loads="true", scale="time", place="portfolio", split="roofline", copy_price=0.0, min_gain=0.0
    ),
    # The paper to the letter.
    "moeless": BalancerConfig(loads="predicted", scale="cv", place="warm", split="even"),
    # Ours: modelled time instead of tokens, portfolio placement, two speeds.
    "moeless-roofline": BalancerConfig(
        loads="predicted", scale="time", place="portfolio", split="roofline", window=32, interval=8
    ),
}
