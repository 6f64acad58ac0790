"""Configuration of `moeless profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeless.config.model import CaptureConfig
from moeless.config.options import option, parse_int_set
from moeless.errors import UsageError

AccuracyMetric = Literal["token-recall", "exact-set", "load-accuracy", "straggler-recall"]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(CaptureConfig):
    """How well the router of layer l+d can be predicted from layer l, and how skewed expert loads are."""

    distance: str = option("Prediction distances d in layers, such as 1 or 1-3,5.", default="1-5", group="Profile")
    metric: AccuracyMetric = option("The accuracy that --threshold is on.", default="token-recall", group="Profile")
    threshold: float = option(
        "Accuracy h below which a layer would be fine-tuned, in (0, 1].", default=0.8, group="Profile"
    )
    capture: Path | None = option(
        "Keep the captured router inputs in this folder for `moeless finetune`; an interrupted capture goes on there.",
        default=None,
        group="Profile",
    )
    predictors: Path | None = option(
        "Measure the predictors of this folder, made by `moeless finetune`, beside the untouched routers.",
        default=None,
        group="Profile",
    )
    out: Path = option("Folder for profile.json and the pictures.", default=Path("profile"), group="Profile")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold <= 1:
            raise UsageError(f"--threshold must lie in (0, 1], got {self.threshold}")
        _ = self.distances

    @property
    def distances(self) -> tuple[int, ...]:
        """The prediction distances, ascending."""
        return parse_int_set("--distance", self.distance, minimum=1)
