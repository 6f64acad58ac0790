"""Configuration of the serving engine, shared by `moeless serve`, `bench serve` and `moeless.LLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeless.config.model import ModelConfig
from moeless.config.options import option
from moeless.errors import UsageError

# "bound" plans from counts that are only known afterwards, so it can be simulated but not served.
ServedBalancer = Literal["static", "eplb", "metro", "oracle", "moeless", "moeless-roofline"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelConfig):
    """How many ranks there are, what each may hold, and how experts are balanced over them."""

    predictors: str | None = option("Folder made by `moeless finetune`.", default=None, group="Experts")
    distance: int | None = option(
        "Layers ahead that are predicted (default: the smallest distance in the folder).",
        default=None,
        minimum=1,
        group="Experts",
    )
    ep: int = option("Ranks that share the experts.", default=1, minimum=1, maximum=1_024, group="Experts")
    balancer: ServedBalancer = option("How experts are scaled and placed.", default="moeless-roofline", group="Experts")
    expert_slots: int | None = option(
        "Replicas a layer may have over all ranks (default: one of each expert and one more a rank).",
        default=None,
        minimum=1,
        group="Experts",
    )
    expert_memory_gb: float | None = option(
        "Memory for experts on each rank; less than they need is slower and stays exact (default: what they need).",
        default=None,
        minimum=0.0,
        group="Experts",
    )
    keep_alive: float = option(
        "Seconds that a replica which no plan wants stays without a token.", default=60.0, minimum=0.0, group="Experts"
    )
    scale_to_zero: bool = option(
        "Let every expert go that no rank has had a token for during --keep-alive; the next token loads it again.",
        default=False,
        group="Experts",
    )
    verify: float = option(
        "Share of expert layer executions that are computed a second time, plainly from the checkpoint, and compared; "
        "a difference is logged and counted in moeless:verify_mismatches_total.",
        default=0.0,
        minimum=0.0,
        maximum=1.0,
        group="Experts",
        metavar="FRACTION",
    )

    max_model_len: int | None = option(
        "Context length in tokens (default: the model's, or what the key-value cache holds).",
        default=None,
        minimum=1,
        group="Batching",
    )
    max_batch_tokens: int = option(
        "Tokens of one step of one rank; longer prompts are cut into chunks.",
        default=2_048,
        minimum=1,
        group="Batching",
        flag="--max-num-batched-tokens",
    )
    max_seqs: int = option(
        "Sequences running at once on one rank.", default=128, minimum=1, group="Batching", flag="--max-num-seqs"
    )
    kv_tokens: int = option(
        "Tokens whose keys and values one rank keeps, allocation granularity included.",
        default=65_536,
        minimum=16,
        group="Batching",
    )

    step_timeout: float = option("Seconds one collective may take.", default=30.0, minimum=0.1, group="Ranks")
    start_timeout: float = option("The same while ranks start.", default=600.0, minimum=1.0, group="Ranks")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_map != "none":
            raise UsageError("--device-map auto is for profile and finetune; the engine places experts itself")
        if self.distance is not None and self.predictors is None:
            raise UsageError(f"--distance {self.distance} has no effect without --predictors")
        if self.predictors is not None and self.balancer not in ("moeless", "moeless-roofline"):
            raise UsageError(f"--predictors has no effect with --balancer {self.balancer}, which predicts nothing")
        if self.verify and self.balancer == "oracle":
            raise UsageError(f"--verify {self.verify} does not go with --balancer oracle, which is wrong by design")
        if self.scale_to_zero and not self.keep_alive:
            raise UsageError("--scale-to-zero needs a --keep-alive above 0: experts would leave between two tokens")
        if self.expert_slots is not None and self.ep == 1:
            raise UsageError(f"--expert-slots {self.expert_slots} has no effect on one rank")

    @property
    def runs_whole(self) -> bool:
        """Whether a rank runs the model as it is: nothing to share, predict, verify, let go or fit in."""
        if self.ep > 1 or self.verify or self.scale_to_zero:
            return False
        return self.predictors is None and self.expert_memory_gb is None
