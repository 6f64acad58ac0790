"""What a rank process is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a rank process is to be."""

    config: dict[str, Any]
    member: int
    """Its number for life, and its name on the channel."""
    seat: int
    """Which accelerator of its host it takes."""
    store_host: str
    store_port: int
    channel: str
    num_threads: int
