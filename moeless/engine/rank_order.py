"""What a rank process is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a rank process is to be."""

    config: dict[str, Any]
    rank: int
    size: int
    store_host: str
    store_port: int
    channel: str
    num_threads: int
