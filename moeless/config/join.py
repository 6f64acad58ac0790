"""Configuration of `moeless join`."""

from __future__ import annotations

from dataclasses import dataclass

from moeless.config.options import Config, argument, option
from moeless.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class JoinConfig(Config):
    """Which front end to lend ranks to, and how many."""

    address: str = argument("HOST:PORT that the front end got as --rank-address.", metavar="ADDRESS")
    ranks: int = option("Ranks that this host has room for.", default=1, minimum=1, maximum=1_024)
    start_timeout: float = option("Seconds to wait for the front end to appear.", default=600.0, minimum=1.0)
    front_timeout: float = option("Seconds without its answer after which it is gone.", default=30.0, minimum=15.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("ADDRESS", self.address)
        if self.json_output:
            raise UsageError("--json has no effect on join, which prints no result")


def check_address(name: str, address: str) -> None:
    """Raises `UsageError` for what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(f"{name} must be HOST:PORT, got {address!r}")
