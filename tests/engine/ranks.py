"""Real gloo ranks for tests: a few processes that live for the whole session and run functions of `tests.engine.work`.

Importing torch and transformers takes seconds, so a fork server does it once. Every call has a time limit; when it is
passed, or a rank dies, all of them are killed and the next call starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from moeless.engine.ep import EpGroup
from moeless.engine.store import host_store, join_store

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "tests.engine.work"])


class RankPool:
    """Up to `most` processes; `run` uses the first `size` of them as the ranks of a new group."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._store, self.port = host_store()
        self._generation = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        work: Callable[..., Any],
        size: int,
        *,
        limit_s: float = 60.0,
        timeout_s: float = 20.0,
        dying: tuple[int, ...] = (),
        **arguments: Any,
    ) -> list[Any]:
        """`work(group, **arguments)` on `size` ranks; what each returns.

        Args:
            limit_s: for the whole call.
            timeout_s: of the group's collectives.
            dying: ranks that are expected to end without an answer; their result is None.

        Raises:
            AssertionError: a rank raised (its traceback is the message), died, or took too long.
        """
        while len(self._workers) < self._most:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs, self.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._generation += 1
        for rank in range(size):
            self._workers[rank][1].send((work, rank, size, self._generation, timeout_s, arguments))
        try:
            results = self._answers([rank for rank in range(size) if rank not in dying], limit_s)
        except BaseException:
            self.close()
            raise
        if dying:
            self.close()
        return [results.get(rank) for rank in range(size)]

    def _answers(self, awaited: list[int], limit_s: float) -> dict[int, Any]:
        """What each rank returns; the first to fail is the one whose traceback is shown."""
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        while awaited:
            ready = wait([self._workers[rank][1] for rank in awaited], timeout=max(0, deadline - time.monotonic()))
            assert ready, f"ranks {awaited} took more than {limit_s} s"
            for rank in [rank for rank in awaited if self._workers[rank][1] in ready]:
                awaited.remove(rank)
                try:
                    ok, value = self._workers[rank][1].recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                assert ok, f"rank {rank} raised:\n{value}"
                results[rank] = value
        return results

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join(timeout=10)
            assert not process.is_alive()
        self._workers = []


def _serve(connection: Connection, port: int) -> None:
    """A worker: run what comes until the pipe closes."""
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            work, rank, size, generation, timeout_s, arguments = connection.recv()
        except EOFError:
            return
        group = None
        try:
            store = join_store("127.0.0.1", port, timeout_s=30)
            group = EpGroup.connect(
                store, rank=rank, size=size, generation=generation, timeout_s=timeout_s, start_timeout_s=30
            )
            connection.send((True, work(group, **arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
        finally:
            if group is not None:
                group.close()
