"""Configuration of `moeless serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from moeless.config.engine import EngineConfig
from moeless.config.join import check_address
from moeless.config.options import option
from moeless.errors import UsageError

_MOST_RANKS = 8
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Where the service listens, who may use it, and how much it takes on."""

    host: str = option("Address to listen at; 0.0.0.0 opens it to the network.", default="127.0.0.1", group="Server")
    port: int = option(
        "Port; 0 picks a free one and prints it.", default=8000, minimum=0, maximum=65_535, group="Server"
    )
    served_model_name: list[str] | None = option(
        "Name that requests use for the model; may be repeated (default: MODEL).", default=None, group="Server"
    )
    api_key: list[str] | None = option(
        "Key that every request but /health and /ready must bring; may be repeated. MOELESS_API_KEY does the same "
        "without showing it in the process list.",
        default=None,
        group="Server",
    )
    shutdown_timeout: float = option(
        "Seconds that running requests get to end after SIGTERM; a second signal ends them at once.",
        default=30.0,
        minimum=0.0,
        group="Server",
    )
    sse_keep_alive: float = option(
        "Seconds of silence after which a stream gets a comment line; 0 for none.",
        default=0.0,
        minimum=0.0,
        group="Server",
    )
    access_log: bool = option("Log every request on stderr.", default=False, group="Server")

    max_queued: int | None = option(
        "Completions that may wait beyond those that run; more are answered 503 (default: 4 x the running ones).",
        flag="--max-num-queued-reqs",
        default=None,
        minimum=0,
        group="Limits",
    )
    max_body_mb: float = option("Largest request body.", default=16.0, minimum=0.001, group="Limits")
    body_timeout: float = option(
        "Seconds a client may take to send its headers, and again its body.", default=60.0, minimum=0.1, group="Limits"
    )

    on_rank_failure: Literal["replace", "shrink", "exit"] = option(
        "replace goes on with the ranks that are left and has a new one join them; shrink only goes on; exit ends with "
        "an error.",
        default="replace",
        group="Ranks",
    )
    max_ep: int | None = option(
        "Ranks that POST /scale may ask for (default: 8, or --ep if that is more).",
        default=None,
        minimum=1,
        maximum=1_024,
        group="Ranks",
    )
    rank_address: str | None = option(
        "HOST:PORT at which other hosts lend ranks (`moeless join HOST:PORT` there); HOST is this host's address for "
        "them. Both sides need the same MOELESS_RANK_KEY.",
        default=None,
        group="Ranks",
    )
    local_ranks: int | None = option(
        "Ranks of --ep that this host starts itself; the others come from hosts that join.",
        default=None,
        minimum=0,
        group="Ranks",
    )
    heartbeat_timeout: float = option(
        "Seconds without a sign of life, or a step, from a rank after which it counts as hung and is killed.",
        default=30.0,
        minimum=2.0,
        group="Ranks",
    )
    record_dir: Path = option(
        "Folder for the traces of /dump_expert_distribution_record.", default=Path("expert-records"), group="Experts"
    )
    record_mb: float = option(
        "Memory of a running expert distribution record; the oldest steps are dropped.",
        default=64.0,
        minimum=0.001,
        group="Experts",
    )
    metrics_expert_detail: bool = option(
        "Export metrics of every single expert; for models with thousands of experts they get long.",
        default=True,
        group="Experts",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not name for name in self.served_model_name or ()):
            raise UsageError("--served-model-name must not be empty")
        if any(not key for key in self.api_key or ()):
            raise UsageError("--api-key must not be empty")

        if self.max_ep is not None and self.max_ep < self.ep:
            raise UsageError(f"--max-ep {self.max_ep} is less than --ep {self.ep}")
        self._check_hosts()

    def _check_hosts(self) -> None:
        if (self.rank_address is None) != (self.local_ranks is None):
            raise UsageError("--rank-address and --local-ranks go together")
        if self.rank_address is None or self.local_ranks is None:
            return
        check_address("--rank-address", self.rank_address)
        if self.local_ranks >= self.ep:
            raise UsageError(f"--local-ranks {self.local_ranks} leaves none of --ep {self.ep} to other hosts")
        host = self.rank_address.rpartition(":")[0]
        if host not in LOCAL_HOSTS and not os.environ.get("MOELESS_RANK_KEY"):
            raise UsageError("set MOELESS_RANK_KEY, which hosts must bring to join over the network")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the first is the one in answers."""
        return tuple(self.served_model_name or (self.model,))

    @property
    def most_ranks(self) -> int:
        """Ranks that there may be: every one takes a model's memory, so one request must not ask for any number."""
        return max(_MOST_RANKS, self.ep) if self.max_ep is None else self.max_ep

    @property
    def capacity(self) -> int:
        """Completions taken on at once by the ranks there are at the start: running and waiting."""
        return self.capacity_of(self.ep)

    def capacity_of(self, num_ranks: int) -> int:
        """Completions that so many ranks take on."""
        running = num_ranks * self.max_seqs
        return running + (4 * running if self.max_queued is None else self.max_queued)

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach the service."""
        return self.host in LOCAL_HOSTS

    def engine_values(self) -> dict[str, Any]:
        """The fields of `EngineConfig`, as plain values for a rank process."""
        return {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
