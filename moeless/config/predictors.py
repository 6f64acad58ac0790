"""Configuration of `moeless bench predictors`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeless.config.model import CaptureConfig
from moeless.config.options import option, parse_int_set, parse_names

PREDICTORS = ("gate", "gate-normed", "history", "actual", "promoe", "promoe-ce", "tuned-plain", "tuned")
_GROUP = "Predictors"


@dataclass(frozen=True, kw_only=True)
class PredictorsConfig(CaptureConfig):
    """Which predictors are compared, at which distances, on what text."""

    distance: str = option("Prediction distances d in layers, such as 1 or 1-3,5.", default="1-5", group=_GROUP)
    predictors: str = option(
        "Which to compare. gate: the original router (Mixtral-offloading); gate-normed: behind its own norm; history: "
        "loads of the 32 iterations before; actual: the truth; promoe: ProMoE's MLP; promoe-ce: the same with "
        "cross-entropy; tuned-plain: fine-tuned copies of the router, hard loss, as the paper has them; tuned: what "
        "`moeless finetune --threshold 1` makes.",
        default=",".join(PREDICTORS),
        group=_GROUP,
    )
    epochs: int = option("Passes over the training rows a stage of tuning.", default=12, minimum=1, group=_GROUP)
    promoe_epochs: int = option(
        "Passes over the training rows for ProMoE's MLPs; each keeps its best.", default=12, minimum=1, group=_GROUP
    )
    capture: Path | None = option(
        "Capture folder to use or to make, as of `moeless finetune --capture`.", default=None, group=_GROUP
    )
    out: Path = option("Folder for predictors.json and the pictures.", default=Path("predictor-bench"), group=_GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.distances, self.names

    @property
    def distances(self) -> tuple[int, ...]:
        """The prediction distances, ascending."""
        return parse_int_set("--distance", self.distance, minimum=1)

    @property
    def names(self) -> tuple[str, ...]:
        """The predictors to compare."""
        return parse_names("--predictors", self.predictors, PREDICTORS)
