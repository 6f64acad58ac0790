"""The ranks of an expert-parallel group and the four things they say to each other.

This is the only file that knows torch.distributed (gloo on CPU, NCCL on CUDA). Payload (`exchange`, `all_to_all`) and
`control` have a process group each, so that a step's control word can never pair up with a layer's rows. One rank alone
is a `LocalGroup`, which needs no store, no port and no initialisation.

Every collective has a time-out: long while ranks start, short afterwards. When one fails, the ranks that notice leave
their name in the store, and the error names those that did not; where a front end watches the ranks it knows better.

Legend: G ranks, C columns of the exchanged row, N rows sent, R rows received, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from moeless.engine.store import Store, meet
from moeless.errors import RankError


@dataclass(frozen=True, slots=True)
class Control:
    """What ranks agree on before a step; each field is the maximum over the ranks.

    Attributes:
        has_work: 1 if any rank has tokens to run.
        stop: 1 if any rank wants all of them to end.
        part: 1 if any rank has been told to leave for another group.
        time_us: the clock of rank 0, microseconds; others pass 0. Whatever feeds a plan reads this clock only.
        heard: number of the front end's last message that arrived.
        least_heard: minus the same, so that its maximum tells the least. Ranks may sleep only when all have heard the
            same, or one would wake for a message that another heard before it fell asleep, and wait for it in vain.
    """

    has_work: int = 0
    stop: int = 0
    part: int = 0
    time_us: int = 0
    heard: int = 0
    least_heard: int = 0


class RankGroup(Protocol):
    """`EpGroup` or `LocalGroup`."""

    rank: int
    size: int
    device: torch.device
    is_waiting: bool
    """Whether this rank is in a collective; for another thread to see."""

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
        self.is_waiting = False

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
        self,
        rank: int,
        size: int,
        device: torch.device,
        store: Store,
        timeout_s: float,
        start_timeout_s: float,
        roll_call_s: float,
    ) -> None:
        """Join; use `connect`."""
        self.rank, self.size, self.device = rank, size, device
        self.is_waiting = False
        self._store, self._timeout_s, self._roll_call_s = store, start_timeout_s, roll_call_s
        self._payload: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._is_open = True
        try:
            with self._naming("joining the group"):
                self._connect(timedelta(seconds=start_timeout_s))
            self._warm_up()
        except RankError:
            self.close()
            raise
        self._timeout_s = timeout_s
        for group in (self._payload, self._control):
            assert group is not None, "it has just been connected"
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
        roll_call_s: float = 1.0,
        is_called_off: Callable[[], bool] = lambda: False,
    ) -> EpGroup | LocalGroup:
        """Join generation `generation` of the group; every rank calls this with the same sizes.

        Args:
            store: from `host_store` or `join_store`; it should live in a process that is not a rank, so that a
                survivor of any rank's death can form the next generation through it.
            timeout_s: how long a collective may take; the device's own work before it counts.
            start_timeout_s: the same while ranks are still starting.
            roll_call_s: how long to wait, after a failure, for the others to notice too; 0 names nobody.
            is_called_off: asked while other ranks are missing; once true, joining is given up.

        Raises:
            RankError: a rank did not join in time, or joining was called off.
        """
        if size == 1:
            return LocalGroup(device)
        scoped = PrefixStore(f"generation{generation}", store)
        meet(scoped, rank, size, start_timeout_s, is_called_off)
        return EpGroup(rank, size, torch.device(device), scoped, timeout_s, start_timeout_s, roll_call_s)

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
            if dist.is_initialized():
                dist.destroy_process_group()
            self._payload = self._control = None  # the last references: only now do others see this rank leave

    def _connect(self, limit: timedelta) -> None:
        on_cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
            device_id=self.device if on_cuda else None,
        )
        self._payload = dist.new_group(timeout=limit)
        self._control = dist.new_group(backend="gloo", timeout=limit)

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
        self.is_waiting = True
        try:
            yield
        except RuntimeError as error:  # every error of torch.distributed is one
            waited_s = time.monotonic() - begin
            raise RankError(
                f"rank {self.rank} failed at {doing} after {waited_s:.1f} s (limit {self._timeout_s:g} s): "
                f"{self._roll_call()}{str(error).splitlines()[0]}"
            ) from error
        finally:
            self.is_waiting = False

    def _roll_call(self) -> str:
        """Who else noticed the failure within a moment; the others are dead or stuck."""
        if not self._roll_call_s:
            return ""
        keys = {rank: f"noticed{rank}" for rank in range(self.size)}
        try:
            self._store.set(keys[self.rank], "1")
            deadline = time.monotonic() + self._roll_call_s
            absent = list(keys)
            while absent and time.monotonic() < deadline:
                absent = [rank for rank in absent if not self._store.check([keys[rank]])]
                time.sleep(0.02)
        except RuntimeError:
            return "the process that hosts the store is gone; "
        if not absent:
            return "all ranks are alive, the connection between them broke; "
        return f"no answer from rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}; "
