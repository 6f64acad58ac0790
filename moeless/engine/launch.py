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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from moeless import errors
from moeless.config.engine import EngineConfig
from moeless.engine.channel import FrontChannel
from moeless.engine.ep import EpGroup, RankGroup
from moeless.engine.facts import ModelFacts
from moeless.engine.hosts import HostList, RemoteRank
from moeless.engine.interface import interface_to
from moeless.engine.messages import Broken, Failed, Form, Formed, Loaded, Numbered, Pulse, Stop, ToFront, ToRank, Wake
from moeless.engine.rank import rank_device
from moeless.engine.rank_order import RankOrder
from moeless.engine.store import host_store, join_store
from moeless.errors import MoelessError, RankError, UsageError
from moeless.policy.cost import CostModel

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
    """Rank processes of this host, and maybe of others, the line to each, and the group that some of them form.

    A process has a *member* number for life, given in the order of starting. Its *rank* is its place in the present
    group: `ranks` has the members of ranks 0, 1, ... Each group is one generation.
    """

    def __init__(self, hosts: HostList | None = None) -> None:
        """Start nothing yet. `hosts` are those that may be asked to start ranks."""
        self.ranks: list[int] = []
        self.generation = 0
        self.processes: dict[int, subprocess.Popen[str] | RemoteRank] = {}
        self._hosts = hosts
        self._number = self._num_started = 0
        self._dying: list[subprocess.Popen[str] | RemoteRank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="moeless-")  # only this user may enter it
        self._host = "127.0.0.1" if hosts is None else hosts.host
        here = f"ipc://{Path(self._folder.name) / 'ranks'}"
        self.channel = FrontChannel(here if hosts is None else f"tcp://{self._host}:*")
        self._store, self._port = host_store(self._host)

    def start(self, config: EngineConfig, *, seat: int, num_local: int, is_remote: bool = False) -> int:
        """Start a process that loads the model and says `Loaded`; its member number.

        Args:
            seat: a number that no other living process has; picks its accelerator.
            num_local: ranks that share this host.
            is_remote: have another host start it.

        Raises:
            RankError: no other host has room.
        """
        order = RankOrder(
            config=asdict(config),
            member=self._num_started,
            seat=seat,
            store_host=self._host,
            store_port=self._port,
            channel=self.channel.address,
            num_threads=num_threads(num_local),
        )
        assert self._hosts is not None or not is_remote, "there are no other hosts"
        process = self._hosts.start(order) if is_remote and self._hosts is not None else start_rank(order)
        self.processes[order.member] = process
        self._num_started += 1
        return order.member

    def form(self, members: Sequence[int], cost: CostModel | None = None) -> None:
        """Have `members`, which have loaded the model, form the next group; other ranks of the present one end."""
        leaving = [member for member in self.ranks if member not in members and member in self.processes]
        self.ranks, self._number = list(members), 0
        self.generation += 1
        for member in leaving:
            with suppress(RankError):
                self.channel.send(member, Form(self.generation, None, len(members)))
        for rank, member in enumerate(members):
            with suppress(RankError):  # it has died since, which shows
                self.channel.send(member, Form(self.generation, rank, len(members), cost))

    def start_group(self, config: EngineConfig) -> ModelFacts:
        """Start `config.ep` ranks on this host and wait until they are a group.

        Raises:
            MoelessError: what went wrong on a rank; none is left running.
        """
        try:
            for seat in range(config.ep):
                self.start(config, seat=seat, num_local=config.ep)
            loaded = self._await_all(Loaded, config.start_timeout)
            self.form(sorted(self.processes))
            self._await_all(Formed, config.start_timeout)
        except BaseException:
            self.close(kill=True)
            raise
        facts = loaded[0]
        assert isinstance(facts, Loaded), "that is what was waited for"
        return facts.facts

    def send(self, rank: int, make: Callable[[int], Numbered]) -> None:
        """Send what `make` gives for the next number to `rank`, and wake the others.

        Raises:
            RankError: a rank is gone.
        """
        self._number += 1
        for other, member in enumerate(self.ranks):
            self.channel.send(member, make(self._number) if other == rank else Wake(self._number))  # type: ignore[arg-type]

    def broadcast(self, make: Callable[[int], Numbered]) -> None:
        """Send what `make` gives for the next number to all ranks. Raises `RankError`."""
        self._number += 1
        self.tell_all(make(self._number))  # type: ignore[arg-type]

    def tell_all(self, message: ToRank) -> None:
        """Send a message to all ranks as it is. Raises `RankError`."""
        for member in self.ranks:
            self.channel.send(member, message)

    def receive(self, timeout_s: float = 600.0) -> tuple[int, ToFront]:
        """The next message and the member it is from, where any loss is the end.

        Raises:
            MoelessError: a rank failed, died, or nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        broken = ""
        while time.monotonic() < deadline:
            received = self.channel.receive(_POLL_S)
            if received is None:
                self._check_alive()
                if broken:  # and nobody has died since
                    raise RankError(broken)
            elif isinstance(received[1], Failed):
                raise error_of(received[0], received[1])
            elif isinstance(received[1], Broken):
                broken = received[1].message
                if received[1].error != RankError.__name__:
                    raise error_of(received[0], Failed(received[1].error, broken))
            elif not isinstance(received[1], Pulse):
                return received
        raise RankError(f"no rank said anything for {timeout_s:g} s")

    def how_ended(self, member: int) -> str | None:
        """How a process has ended; None while it runs."""
        code = self.processes[member].poll()
        if code is None:
            return None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self, member: int) -> None:
        """End a process at once, if it has not ended, and forget it."""
        process = self.processes.pop(member)
        process.kill()
        self._dying.append(process)
        self.reap()

    def reap(self) -> None:
        """Release what killed processes have left."""
        for process in [process for process in self._dying if process.poll() is not None]:
            self._dying.remove(process)
            if process.stdin is not None:
                process.stdin.close()

    def close(self, *, kill: bool = False) -> None:
        """End all processes: asked first, if they are a group and not to be killed; safe to call twice."""
        asked = not kill and all(process.poll() is None for process in self.processes.values())
        if asked:
            with suppress(RankError):
                self.broadcast(Stop)
        for member in list(self.processes):
            if not asked or member not in self.ranks:
                self.kill(member)
        deadline = time.monotonic() + _STOP_S
        for process in [*self._dying, *self.processes.values()]:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.channel.close()
        self._folder.cleanup()

    def _await_all(self, kind: type[Loaded | Formed], timeout_s: float) -> dict[int, ToFront]:
        found: dict[int, ToFront] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self.processes):
            member, message = self.receive(max(0.1, deadline - time.monotonic()))
            if isinstance(message, kind):
                found[member] = message
        return found

    def _check_alive(self) -> None:
        """Raises `RankError` when a process has ended."""
        for member in self.processes:
            if (how := self.how_ended(member)) is not None:
                raise RankError(f"rank {member} died ({how}); see its output above")


def num_threads(num_ranks: int) -> int:
    """Threads of each rank of a host: what OMP_NUM_THREADS says, else an equal share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(1, (os.cpu_count() or 1) // num_ranks)


def start_rank(order: RankOrder) -> subprocess.Popen[str]:
    """A rank process of this host; its stdin is to be kept open."""
    environment = {"OMP_NUM_THREADS": str(order.num_threads), **os.environ}
    if (interface := interface_to(order.store_host)) is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
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


def error_of(member: int, failed: Failed) -> MoelessError:
    """The error that a rank process reported, of the same class where it is a user's to read."""
    kind = getattr(errors, failed.error, None) if failed.error else None
    if isinstance(kind, type) and issubclass(kind, MoelessError):
        return kind(failed.message)
    return RankError(f"rank process {member} failed:\n{failed.message}")
