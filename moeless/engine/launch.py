"""Starting the ranks of a group: as processes of this host, or by joining those that torchrun started.

The starter hosts the store through which ranks find each other, so the death of any rank leaves it in place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from moeless import errors
from moeless.config.engine import EngineConfig
from moeless.engine.channel import FrontChannel
from moeless.engine.engine import ModelFacts
from moeless.engine.ep import EpGroup, RankGroup, host_store, join_store
from moeless.engine.hosts import HostList, RemoteRank
from moeless.engine.messages import Failed, Numbered, Ready, Stop, ToFront, ToRank, Wake
from moeless.engine.rank import rank_device
from moeless.engine.rank_order import RankOrder
from moeless.errors import MoelessError, RankError, UsageError

_POLL_S = 0.2
_STOP_S = 5.0

_Numbered = TypeVar("_Numbered", bound=Numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunPlace:
    """Who this process is among those that torchrun, Slurm or a pod specification started."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> TorchrunPlace | None:
        """From the usual variables; None when they are not all there. Raises `UsageError` for ones that are damaged."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names):
            return None
        rank, size, host, port = (environment[name] for name in names)
        try:
            local_rank = int(environment.get("LOCAL_RANK", rank))
            return TorchrunPlace(rank=int(rank), size=int(size), local_rank=local_rank, host=host, port=int(port))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE or MASTER_PORT is not a number: {error}") from error


def join_torchrun(config: EngineConfig, place: TorchrunPlace) -> tuple[EngineConfig, RankGroup]:
    """Join the group of `place`, and `config` with this rank's device.

    Raises:
        UsageError: the group has another size than `config.ep`.
        RankError: a rank did not come in time.
    """
    if config.ep != place.size:
        raise UsageError(f"--ep {config.ep} does not fit the {place.size} processes that were started (WORLD_SIZE)")
    config = rank_device(config, place.local_rank)
    agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank == 0 and not agent_hosts_store:
        store, _ = host_store(place.host, place.port)
    else:
        store = join_store(place.host, place.port, config.start_timeout)
    group = EpGroup.connect(
        store,
        rank=place.rank,
        size=place.size,
        device=config.device,
        timeout_s=config.step_timeout,
        start_timeout_s=config.start_timeout,
    )
    return config, group


class RankProcesses:
    """A group of rank processes on this host, and maybe on others, and the line to each."""

    def __init__(self, config: EngineConfig, hosts: HostList | None = None, num_local: int | None = None) -> None:
        """Start `config.ep` ranks; each says `Ready` when it has loaded the model (see `wait_ready`).

        Args:
            hosts: where ranks from number `num_local` on are started; None: all are started here.

        Raises:
            RankError: the hosts have no room for a rank.
        """
        self.size = config.ep
        self._config = config
        self._number = 0
        self.is_ready = False
        """To be set when all ranks are, if not by `wait_ready`; then they are asked to end before they are killed."""
        self._folder = tempfile.TemporaryDirectory(prefix="moeless-")  # only this user may enter it
        host = "127.0.0.1" if hosts is None else hosts.host
        here = f"ipc://{Path(self._folder.name) / 'ranks'}"
        self.channel = FrontChannel(here if hosts is None else f"tcp://{host}:*")
        self._store, port = host_store(host)
        self._processes: list[subprocess.Popen[str] | RemoteRank] = []
        try:
            for rank in range(self.size):
                order = RankOrder(
                    config=asdict(config),
                    rank=rank,
                    size=self.size,
                    store_host=host,
                    store_port=port,
                    channel=self.channel.address,
                    num_threads=num_threads(self.size if num_local is None else num_local),
                )
                is_local = hosts is None or rank < (num_local or 0)
                self._processes.append(start_rank(order) if is_local or hosts is None else hosts.start(order))
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> ModelFacts:
        """Wait until all ranks have loaded the model.

        Raises:
            MoelessError: what went wrong on a rank; none is left running.
        """
        facts: dict[int, ModelFacts] = {}
        deadline = time.monotonic() + self._config.start_timeout
        try:
            while len(facts) < self.size:
                rank, message = self.receive(max(0.1, deadline - time.monotonic()))
                if isinstance(message, Ready):
                    facts[rank] = message.facts
        except BaseException:
            self.close()
            raise
        self.is_ready = True
        return facts[0]

    def send(self, rank: int, make: Callable[[int], Numbered]) -> None:
        """Send what `make` gives for the next number to `rank`, and wake the others.

        Raises:
            RankError: a rank is gone.
        """
        self._number += 1
        for other in range(self.size):
            self.channel.send(other, make(self._number) if other == rank else Wake(self._number))  # type: ignore[arg-type]

    def broadcast(self, make: Callable[[int], Numbered]) -> None:
        """Send what `make` gives for the next number to all ranks. Raises `RankError`."""
        self._number += 1
        self.tell_all(make(self._number))  # type: ignore[arg-type]

    def tell_all(self, message: ToRank) -> None:
        """Send a message to all ranks as it is. Raises `RankError`."""
        for rank in range(self.size):
            self.channel.send(rank, message)

    def receive(self, timeout_s: float = 600.0) -> tuple[int, ToFront]:
        """The next message and the rank it is from.

        Raises:
            MoelessError: a rank failed, died, or nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            received = self.channel.receive(_POLL_S)
            if received is None:
                self.check_alive()
            elif isinstance(received[1], Failed):
                raise error_of(received[0], received[1])
            else:
                return received
        raise RankError(f"no rank said anything for {timeout_s:g} s")

    def close(self) -> None:
        """End all ranks: asked first, killed if they don't; safe to call twice."""
        if all(process.poll() is None for process in self._processes) and self.is_ready:
            with suppress(RankError):
                self.broadcast(Stop)
        else:
            for process in self._processes:
                process.kill()
        deadline = time.monotonic() + _STOP_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.channel.close()
        self._folder.cleanup()

    def check_alive(self) -> None:
        """Raises `RankError` when a rank's process has ended."""
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise RankError(f"rank {rank} died ({how}); see its output above")


def num_threads(num_ranks: int) -> int:
    """Threads of each rank of a host: what OMP_NUM_THREADS says, else an equal share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(1, (os.cpu_count() or 1) // num_ranks)


def start_rank(order: RankOrder) -> subprocess.Popen[str]:
    """A rank process of this host; its stdin is to be kept open."""
    environment = {"OMP_NUM_THREADS": str(order.num_threads), **os.environ}
    if order.store_host == "127.0.0.1":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    process = subprocess.Popen(
        [sys.executable, "-m", "moeless.engine.rank"],
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # an interrupt from the terminal is the starter's to handle
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(order)) + "\n")
    process.stdin.flush()
    return process


def error_of(rank: int, failed: Failed) -> MoelessError:
    """The error that a rank reported, of the same class where it is a user's to read."""
    kind = getattr(errors, failed.error, None) if failed.error else None
    if isinstance(kind, type) and issubclass(kind, MoelessError):
        return kind(failed.message)
    return RankError(f"rank {rank} failed:\n{failed.message}")
