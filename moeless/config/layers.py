"""Configuration of `moeless bench layers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeless.config.options import Config, option, parse_int_set, parse_names
from moeless.config.simulate import BALANCER_NAMES
from moeless.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LayersConfig(Config):
    """Live time of one MoE layer on real ranks, for every balancer in turn on the same tokens."""

    routes: Path | None = option(
        "Routing trace with expert ids of tokens (default: those of --model on text).", default=None, group="Routes"
    )
    model: str | None = option(
        "Checkpoint whose own routes are used (default: the bundled checkpoints/demo-moe).",
        default=None,
        group="Routes",
    )
    layers: str | None = option(
        "Layers of the routes to measure, one after the other, such as 0,12 (default: four over the whole depth).",
        default=None,
        group="Routes",
    )
    tokens_per_rank: int = option("Tokens of each rank in an iteration.", default=256, minimum=1, group="Routes")
    iterations: int = option("Iterations measured of each layer.", default=12, minimum=2, group="Routes")
    warmup: int = option(
        "Iterations before that are routed and planned, but not computed.", default=64, minimum=0, group="Routes"
    )
    seed: int = option("Seed of the workload and of the weights.", default=0, minimum=0, group="Routes")

    ep: int = option("Ranks.", default=2, minimum=2, maximum=64, group="Machine")
    device: Literal["cpu", "cuda"] = option("Where ranks compute.", default="cpu", group="Machine")
    clock: Literal["wall", "cpu"] = option(
        "wall: what passes. cpu: each rank's own processor time, so that more ranks than cores can be judged; "
        "a layer is then its slowest rank.",
        default="wall",
        group="Machine",
    )
    repeats: int | None = option(
        "With --clock cpu: run each rank's computation this often and take the least, because a layer is its slowest "
        "rank and anything else on the machine slows one or another (default: 3).",
        default=None,
        minimum=1,
        group="Machine",
    )
    hidden: int = option("Width of a token.", default=1_024, minimum=8, group="Machine")
    ffn: int = option("Inner width of an expert.", default=2_048, minimum=8, group="Machine")
    dtype: Literal["float32", "bfloat16"] = option("Precision.", default="float32", group="Machine")
    calibrate: Path | None = option(
        "Only measure what an expert, a transfer and a load cost, and write it as a cluster for "
        "`moeless bench simulate --cluster`, a .json file.",
        default=None,
        group="Machine",
    )

    balancers: str = option(
        f"Methods to compare with static, out of {', '.join(BALANCER_NAMES)}.",
        default="static,eplb,metro,moeless,moeless-roofline,bound",
        group="Balancing",
    )
    predictor: Literal["history", "actual"] = option(
        "Where predicted loads come from: what was observed, or the truth.", default="history", group="Balancing"
    )
    slots_per_layer: int | None = option(
        "Room for replicas of a layer over all ranks (default: one spare slot a rank).",
        default=None,
        minimum=1,
        group="Balancing",
    )
    out: Path = option("Folder for layers.json.", default=Path("layers"), group="Output")
    limit_s: float = option("Give up after this many seconds.", default=3_600.0, minimum=1, group="Output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.routes is not None and self.model is not None:
            raise UsageError("--routes and --model exclude each other: each says where routes come from")
        if self.device == "cuda" and self.clock == "cpu":
            raise UsageError("--clock cpu has no effect with --device cuda, where the processor only waits")
        if self.repeats is not None and self.clock == "wall":
            raise UsageError(f"--repeats {self.repeats} has no effect without --clock cpu")
        if self.calibrate is not None:
            if self.routes is not None or self.model is not None:
                raise UsageError("--routes and --model have no effect with --calibrate, which routes nothing")
            if self.calibrate.suffix != ".json":
                raise UsageError(f"--calibrate must end in .json, got {str(self.calibrate)!r}")
        _ = self.balancer_names, self.layer_numbers

    @property
    def num_repeats(self) -> int:
        """Runs of each rank's computation."""
        return (self.repeats or 3) if self.clock == "cpu" else 1

    @property
    def balancer_names(self) -> tuple[str, ...]:
        """The methods to compare, static first."""
        names = parse_names("--balancers", self.balancers, BALANCER_NAMES)
        return ("static", *(name for name in names if name != "static"))

    @property
    def layer_numbers(self) -> tuple[int, ...] | None:
        """The layers to measure, None for the default."""
        return parse_int_set("--layers", self.layers, minimum=0) if self.layers is not None else None
