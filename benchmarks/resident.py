"""Memory and time of a server that this process has started: its front and its ranks, as the kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path


def server_pids() -> tuple[int, list[int]]:
    """The front and its ranks. Raises `LookupError` when this process has no such child."""
    for pid in _children(os.getpid()):
        if b"\0serve\0" in _command(pid):
            return pid, [rank for rank in _children(pid) if b"moeless.engine.rank" in _command(rank)]
    raise LookupError("no server is running")


def resident_mb(field: str = "VmRSS") -> dict[str, float]:
    """Resident set of `front` and of all `ranks` together, in MB; or a part of it, such as `RssAnon`."""
    front, ranks = server_pids()
    return {"front": _status_mb(front, field), "ranks": round(sum(_status_mb(rank, field) for rank in ranks), 1)}


def cpu_s() -> list[float]:
    """Processor time that each rank has used since its start, in seconds."""
    _, ranks = server_pids()
    ticks = [Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[11:13] for rank in ranks]
    return [(int(user) + int(system)) / os.sysconf("SC_CLK_TCK") for user, system in ticks]


def _status_mb(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0) * 1024 / 1e6, 1)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():  # a child belongs to the thread that started it
        found += map(int, (task / "children").read_text().split())
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
