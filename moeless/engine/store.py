"""The store through which ranks find each other; hosted by a process that is not a rank, it outlives any of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore

from moeless.errors import RankError

_POLL_S = 0.005


def host_store(host: str = "127.0.0.1", port: int = 0) -> tuple[Store, int]:
    """A store that ranks can join at this host's address `host` and at no other, and its port (a free one for 0).

    Raises:
        RankError: the address is not this host's, or the port is taken.
    """
    try:  # left to itself the store listens on every address of the host
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise RankError(f"cannot host the ranks' store at {host}:{port}: {error.strerror or error}") from error
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int, timeout_s: float = 600.0) -> Store:
    """The store that another process hosts.

    Raises:
        RankError: nobody answers at `host:port` in time.
    """
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankError(f"no store answers at {host}:{port} within {timeout_s:g} s; is the front running?") from error


def meet(store: Store, rank: int, size: int, timeout_s: float, is_called_off: Callable[[], bool]) -> None:
    """Return when all ranks have come to the store: from here on joining takes them moments. Raises `RankError`."""
    deadline = time.monotonic() + timeout_s
    try:
        store.set(f"here{rank}", "1")
        while absent := [other for other in range(size) if not store.check([f"here{other}"])]:
            if is_called_off():
                raise RankError(f"rank {rank} gave up joining: another group is to be formed")
            if time.monotonic() > deadline:
                raise RankError(f"ranks {absent} did not come to join within {timeout_s:g} s")
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise RankError(f"rank {rank} cannot join: the process that hosts the store is gone") from error
