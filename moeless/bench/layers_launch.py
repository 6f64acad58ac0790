"""Ranks for one measurement: processes of this host that run one function and end.

A fork server imports torch and transformers once for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from moeless.engine.ep import EpGroup, RankGroup
from moeless.engine.store import host_store, join_store
from moeless.errors import MoelessError, RankError


def run_ranks(
    work: Callable[[RankGroup, Any], Any], job: Any, *, size: int, device: str, num_threads: int, limit_s: float
) -> list[Any]:
    """`work(group, job)` on `size` ranks; what each gives back.

    Args:
        device: `cpu`, or `cuda` for one GPU a rank.

    Raises:
        RankError: a rank failed (with its words), died, or took longer than `limit_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", work.__module__])
    store, port = host_store()
    lines: list[Connection] = []
    processes = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = device if device == "cpu" else f"{device}:{rank}"
            arguments = (theirs, port, rank, size, place, num_threads, work, job)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            lines.append(ours)
            processes.append(process)
        return _collect(lines, time.monotonic() + limit_s, limit_s)
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.kill()
            process.join()
        del store


def _collect(lines: list[Connection], deadline: float, limit_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(lines):
        awaited = {rank: line for rank, line in enumerate(lines) if rank not in results}
        ready = wait(list(awaited.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"the ranks took more than {limit_s:g} s; give more with --limit-s, or fewer iterations")
        for rank in [rank for rank, line in awaited.items() if line in ready]:
            try:
                ok, value = lines[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(lines))]


def _run(
    line: Connection,
    port: int,
    rank: int,
    size: int,
    device: str,
    num_threads: int,
    work: Callable[[RankGroup, Any], Any],
    job: Any,
) -> None:
    """A rank's whole life."""
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(num_threads)
    try:
        store = join_store("127.0.0.1", port)
        group = EpGroup.connect(store, rank=rank, size=size, device=device, timeout_s=300.0)
        line.send((True, work(group, job)))
    except MoelessError as error:
        line.send((False, str(error)))
    except Exception:
        line.send((False, traceback.format_exc()))
    else:
        group.close()
