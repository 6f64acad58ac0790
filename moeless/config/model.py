"""Which checkpoint to load and how, shared by all commands that run a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeless.config.options import Config, argument, option
from moeless.errors import UsageError

_GROUP = "Model"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A Hugging Face checkpoint folder (or hub id) and the device it runs on."""

    model: str = argument("Checkpoint folder, or a hub id.", metavar="MODEL")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "Compute precision; auto is float32 on CPU and the checkpoint's own on a GPU.", default="auto", group=_GROUP
    )
    device: str = option("Device to run on: auto, cpu, cuda, cuda:1 ...", default="auto", group=_GROUP)
    device_map: Literal["none", "auto"] = option(
        "auto spreads a model larger than the device over devices, CPU memory and disk (accelerate).",
        default="none",
        group=_GROUP,
    )
    cpu_memory_gb: float | None = option(
        "CPU memory that --device-map auto may fill with weights before it goes to disk.",
        default=None,
        minimum=0,
        group=_GROUP,
    )
    offload_dir: str | None = option(
        "Folder for weights that --device-map auto puts on disk.", default=None, group=_GROUP
    )
    tokenizer: str | None = option(
        "Folder or hub id of the tokenizer, when the checkpoint has none.", default=None, group=_GROUP
    )
    trust_remote_code: bool = option("Run model code that comes with the checkpoint.", default=False, group=_GROUP)
    revision: str | None = option("Hub revision (branch, tag or commit).", default=None, group=_GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device_map == "auto" and self.device != "auto":
            raise UsageError(f"--device {self.device} has no effect with --device-map auto; give one of the two")
        for name, value in (("--offload-dir", self.offload_dir), ("--cpu-memory-gb", self.cpu_memory_gb)):
            if value is not None and self.device_map == "none":
                raise UsageError(f"{name} has no effect without --device-map auto")


@dataclass(frozen=True, kw_only=True)
class CaptureConfig(ModelConfig):
    """What text to run through the model and how much of it."""

    data: str | None = option(
        "ShareGPT JSON, JSONL with text, prompt or messages, plain text, a folder of these, or - for stdin. "
        "Default: the documentation that comes with Python.",
        default=None,
        group="Data",
    )
    max_tokens: int = option("Prefill tokens to capture.", default=32_768, minimum=64, group="Data")
    decode_tokens: int = option(
        "Decode tokens to capture from the model's own continuations; 0 for prefill only.",
        default=4_096,
        minimum=0,
        group="Data",
    )
    max_length: int = option("Cut documents to this many tokens.", default=1_024, minimum=8, group="Data")
    batch_tokens: int = option(
        "Tokens of one packed prefill batch, which is one iteration of the load metrics.",
        default=1_024,
        minimum=8,
        group="Data",
    )
    decode_batch: int = option("Sequences decoded together.", default=16, minimum=1, maximum=1_024, group="Data")
    seed: int = option("Seed of document order and sampling.", default=0, minimum=0, group="Data")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length > self.batch_tokens:
            raise UsageError(
                f"--max-length {self.max_length} does not fit in a batch of --batch-tokens {self.batch_tokens}"
            )
