"""The ranks of an expert-parallel group and the four things they say to each other.

This is the only file that knows torch.distributed (gloo on CPU, NCCL on CUDA). Payload (`exchange`, `all_to_all`) and
`control` have a process group each, so that a step's control word can never pair up with a layer's rows. One rank alone
is a `LocalGroup`, which needs no store, no port and no initialisation.

Every collective has a time-out: long while ranks start, short afterwards. When one fails, the ranks that notice leave
their name in the store, and the error names those that did not.

Legend: G ranks, C columns of the exchanged row, N rows sent, R rows received, H hidden.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moeless.errors import RankError

_ROLL_CALL_S = 1.0


@dataclass(frozen=True, slots=True)
class Control:
    """What ranks agree on before a step; each field is the maximum over the ranks.

    Attributes:
        has_work: 1 if any rank has tokens to run.
        stop: 1 if any rank wants all of them to end.
        generation: count of membership changes; a higher one than one's own means a new group is to be formed.
        time_us: the clock of rank 0, microseconds; others pass 0. Whatever feeds a plan reads this clock only.
        heard: number of the front end's last message that arrived.
        least_heard: minus the same, so that its maximum tells the least. Ranks may sleep only when all have heard the
            same, or one would wake for a message that another heard before it fell asleep, and wait for it in vain.
    """

    has_work: int = 0
    stop: int = 0
    generation: int = 0
    time_us: int = 0
    heard: int = 0
    least_heard: int = 0


class RankGroup(Protocol):
    """`EpGroup` or `LocalGroup`."""

    rank: int
    size: int
    device: torch.device

    def exchange(self, row_C: torch.Tensor) -> torch.Tensor:
        """Every rank's `row_C` (integers, same length everywhere) as [G, C] in CPU memory."""
        ...

    def start_all_to_all(
        self, rows_NH: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """Send `send_counts[g]` consecutive rows to rank g; calling the result waits for the rows [R, H] by source."""
        ...

    def control(self, word: Control) -> Control:
        """The maximum of all ranks' words; every rank has to call it once a step."""
        ...

    def close(self) -> None:
        """Leave the group; safe to call twice and after a failure."""
        ...


def all_to_all(
    group: RankGroup, rows_NH: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> torch.Tensor:
    """`start_all_to_all` and its wait in one."""
    return group.start_all_to_all(rows_NH, send_counts, receive_counts)()


class LocalGroup:
    """A group of one rank: everything said is heard at once."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = 0, 1, torch.device(device)

    def exchange(self, row_C: torch.Tensor) -> torch.Tensor:
        """See `RankGroup`."""
        return row_C.unsqueeze(0).cpu()

    def start_all_to_all(
        self, rows_NH: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """See `RankGroup`."""
        return lambda: rows_NH

    def control(self, word: Control) -> Control:
        """See `RankGroup`."""
        return word

    def close(self) -> None:
        """Nothing to leave."""


class EpGroup:
    """Ranks in as many processes, joined through a store that outlives them (see `connect`)."""

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Store, timeout_s: float, start_timeout_s: float
    ) -> None:
        """Join; use `connect`."""
        self.rank, self.size, self.device = rank, size, device
        self._store, self._timeout_s = store, start_timeout_s
        self._is_open = False
        with self._naming("joining the group"):
            backend = "nccl" if device.type == "cuda" else "gloo"
            limit = timedelta(seconds=start_timeout_s)
            device_id = device if device.type == "cuda" else None
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device_id
            )
            self._is_open = True
            self._payload = dist.new_group(timeout=limit)
            self._control = dist.new_group(backend="gloo", timeout=limit)
        self._warm_up()
        self._timeout_s = timeout_s
        for group in (self._payload, self._control):
            group.set_timeout(timedelta(seconds=timeout_s))

    @staticmethod
    def connect(
        store: Store,
        *,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        generation: int = 0,
        timeout_s: float = 30.0,
        start_timeout_s: float = 600.0,
    ) -> EpGroup | LocalGroup:
        """Join generation `generation` of the group; every rank calls this with the same sizes.

        Args:
            store: from `host_store` or `join_store`; it should live in a process that is not a rank, so that a
                survivor of any rank's death can form the next generation through it.
            timeout_s: how long a collective may take; the device's own work before it counts.
            start_timeout_s: the same while ranks are still starting.

        Raises:
            RankError: a rank did not join in time.
        """
        if size == 1:
            return LocalGroup(device)
        scoped = PrefixStore(f"generation{generation}", store)
        return EpGroup(rank, size, torch.device(device), scoped, timeout_s, start_timeout_s)

    def exchange(self, row_C: torch.Tensor) -> torch.Tensor:
        """See `RankGroup`. Raises `RankError`."""
        table_GC = row_C.new_empty(self.size, len(row_C), device=self.device)
        with self._naming("exchanging expert counts"):
            dist.all_gather(list(table_GC.unbind(0)), row_C.to(self.device), group=self._payload)
            return table_GC.cpu()

    def start_all_to_all(
        self, rows_NH: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """See `RankGroup`. Raises `RankError`, here or in the wait."""
        received_RH = rows_NH.new_empty(sum(receive_counts), *rows_NH.shape[1:])
        with self._naming("sending rows"):
            work = dist.all_to_all_single(
                received_RH, rows_NH, list(receive_counts), list(send_counts), group=self._payload, async_op=True
            )

        def wait() -> torch.Tensor:
            with self._naming("sending rows"):
                work.wait()
            return received_RH

        return wait

    def control(self, word: Control) -> Control:
        """See `RankGroup`. Raises `RankError`."""
        values = torch.tensor(astuple(word), dtype=torch.int64)
        with self._naming("agreeing on the next step"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return Control(*values.tolist())

    def close(self) -> None:
        """See `RankGroup`."""
        if self._is_open:
            self._is_open = False
            dist.destroy_process_group()

    def _warm_up(self) -> None:
        """One collective of each kind, so that connections are made under the long time-out."""
        self.control(Control())
        self.exchange(torch.zeros(1, dtype=torch.int32))
        one_each = [1] * self.size
        all_to_all(self, torch.zeros(self.size, 1, device=self.device), one_each, one_each)

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        """Turn a failed collective into a `RankError` that names the ranks which are not there."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # every error of torch.distributed is one
            waited_s = time.monotonic() - begin
            raise RankError(
                f"rank {self.rank} failed at {doing} after {waited_s:.1f} s (limit {self._timeout_s:g} s): "
                f"{self._roll_call()}; {str(error).splitlines()[0]}"
            ) from error

    def _roll_call(self) -> str:
        """Who else noticed the failure within a second; the others are dead or stuck."""
        keys = {rank: f"noticed{rank}" for rank in range(self.size)}
        try:
            self._store.set(keys[self.rank], "1")
            deadline = time.monotonic() + _ROLL_CALL_S
            absent = list(keys)
            while absent and time.monotonic() < deadline:
                absent = [rank for rank in absent if not self._store.check([keys[rank]])]
                time.sleep(0.02)
        except RuntimeError:
            return "the process that hosts the store is gone"
        if not absent:
            return "all ranks are alive, the connection between them broke"
        return f"no answer from rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"


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
