"""Configuration of `moeless finetune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeless.config.model import CaptureConfig
from moeless.config.options import option, parse_int_set
from moeless.config.profile import AccuracyMetric
from moeless.errors import UsageError

_GROUP = "Fine-tune"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(CaptureConfig):
    """Which layers get a predictor of their own, how it is trained, and where it goes."""

    distance: str | None = option(
        "Prediction distances d in layers, such as 1 or 1-3,5; default 1. The first d layers, which no router input so "
        "far back exists for, are predicted from their own input before attention.",
        default=None,
        group=_GROUP,
    )
    source: Literal["gate-input", "pre-attention"] = option(
        "What predictors read: the router input d layers before, or the layer's own input before its attention.",
        default="gate-input",
        group=_GROUP,
    )
    metric: AccuracyMetric = option("The accuracy that --threshold is on.", default="token-recall", group=_GROUP)
    threshold: float = option(
        "Accuracy h: only layers below it are tuned, and only until they pass it. 0 tunes none, 1 does its best.",
        default=0.8,
        minimum=0,
        maximum=1,
        group=_GROUP,
    )
    adapter_rank: str = option(
        "Rank of the low-rank adapter: 0 for the paper's plain copy of the gate, auto to grow one only where the plain "
        "copy stays below --threshold.",
        default="auto",
        group=_GROUP,
    )
    loss: Literal["auto", "soft", "hard"] = option(
        "soft: KL to the router's whole distribution; hard: cross-entropy on the experts used; auto: the better one "
        "of each layer.",
        default="auto",
        group=_GROUP,
    )
    epochs: int = option("Passes over the training rows a stage.", default=12, minimum=1, group=_GROUP)
    max_seconds: float | None = option(
        "Stop training after so long, sharing the time evenly over layers.", default=None, minimum=0.1, group=_GROUP
    )
    capture: Path | None = option(
        "Capture folder to use, made by this command or `moeless profile --capture`; made there if it does not exist.",
        default=None,
        group=_GROUP,
    )
    out: Path = option(
        "Folder of the predictors; an interrupted run goes on there.", default=Path("predictors"), group=_GROUP
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "pre-attention" and self.distance is not None:
            raise UsageError(f"--distance {self.distance} has no effect with --source pre-attention")
        _ = self.distances, self.rank

    @property
    def distances(self) -> tuple[int, ...]:
        """The distances to tune for, ascending; () for `pre-attention`."""
        if self.source == "pre-attention":
            return ()
        return parse_int_set("--distance", self.distance or "1", minimum=1)

    @property
    def rank(self) -> int | None:
        """The adapter's rank, None for auto."""
        if self.adapter_rank == "auto":
            return None
        if not self.adapter_rank.isdecimal() or int(self.adapter_rank) > 4_096:
            raise UsageError(f"--adapter-rank must be auto or a number from 0 to 4096, got {self.adapter_rank!r}")
        return int(self.adapter_rank)
