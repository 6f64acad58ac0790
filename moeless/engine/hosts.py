"""Ranks on other hosts: the front end keeps a list of hosts that offered some, and starts ranks there as on its own.

A host runs `moeless join` (`engine/join.py`). It repeats its offer every second, which is its sign of life, and gets an
answer, which is the front end's. Messages are msgpack; an offer must bring the key that both sides were given.
"""

from __future__ import annotations

import hmac
import subprocess
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from moeless.engine.rank_order import RankOrder
from moeless.errors import RankError

SILENT_S = 10.0
"""After so long without an offer a host is gone, and its ranks with it."""


class HostMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all."""


class Offer(HostMessage, frozen=True):
    """A host has room for `num_ranks` ranks in all."""

    key: str
    num_ranks: int


class Ended(HostMessage, frozen=True):
    """The rank process that `Start` asked for has ended."""

    ticket: int
    code: int


class Start(HostMessage, frozen=True):
    """Start a rank process."""

    ticket: int
    order: RankOrder


class Kill(HostMessage, frozen=True):
    """End a rank process at once."""

    ticket: int


class Alive(HostMessage, frozen=True):
    """The front end has heard an offer."""


class Refused(HostMessage, frozen=True):
    """The front end takes nothing from this host."""

    reason: str


ToHost = Start | Kill | Alive | Refused
FromHost = Offer | Ended


@dataclass(slots=True)
class _Host:
    num_ranks: int
    heard_s: float
    tickets: set[int] = field(default_factory=set)


class RemoteRank:
    """A rank process of another host, with what is used here of `subprocess.Popen`."""

    stdin = None

    def __init__(self, hosts: HostList, ticket: int) -> None:
        self._hosts, self._ticket = hosts, ticket

    def poll(self) -> int | None:
        """Its exit code; -9 when its host is gone; None while it runs."""
        return self._hosts.code(self._ticket)

    def kill(self) -> None:
        """End it."""
        self._hosts.kill(self._ticket)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + (SILENT_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank of another host", timeout or SILENT_S)
            time.sleep(0.02)
        return code


class HostList:
    """The front end's side. Not for two threads at once."""

    def __init__(self, address: str, key: str) -> None:
        """Listen at `address` (HOST:PORT). Raises `RankError` when that can't be done."""
        self.host = address.rpartition(":")[0]
        self._key = key.encode()
        self._decode = msgspec.msgpack.Decoder(FromHost).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise RankError(f"cannot listen for ranks at {address}: {error}; give another --rank-address") from error
        self._hosts: dict[bytes, _Host] = {}
        self._codes: dict[int, int] = {}
        self._num_tickets = 0

    def num_free(self) -> int:
        """Ranks that hosts have room for."""
        self.pump()
        return sum(host.num_ranks - len(host.tickets) for host in self._hosts.values())

    def start(self, order: RankOrder) -> RemoteRank:
        """Start a rank on the host with the most room. Raises `RankError` when there is none."""
        self.pump()
        free = {name: host.num_ranks - len(host.tickets) for name, host in self._hosts.items()}
        name = max(free, key=lambda n: free[n], default=b"")
        if free.get(name, 0) < 1:
            raise RankError("no other host has room for a rank; start `moeless join` there")
        self._num_tickets += 1
        self._hosts[name].tickets.add(self._num_tickets)
        self._send(name, Start(self._num_tickets, order))
        return RemoteRank(self, self._num_tickets)

    def kill(self, ticket: int) -> None:
        """See `RemoteRank.kill`."""
        for name, host in self._hosts.items():
            if ticket in host.tickets:
                self._send(name, Kill(ticket))

    def code(self, ticket: int) -> int | None:
        """See `RemoteRank.poll`."""
        self.pump()
        return self._codes.get(ticket)

    def pump(self) -> None:
        """Take in what hosts have said, answer, and give up those that are silent."""
        while self._socket.poll(0):
            name, payload = self._socket.recv_multipart()
            try:
                self._take(name, self._decode(payload))
            except msgspec.DecodeError:
                self._send(name, Refused("the message is none that a host of this version sends"))
        limit_s = time.monotonic() - SILENT_S
        for name in [name for name, host in self._hosts.items() if host.heard_s < limit_s]:
            self._codes.update(dict.fromkeys(self._hosts.pop(name).tickets, -9))

    def close(self) -> None:
        """Listen no more."""
        self._socket.close(linger=0)

    def _take(self, name: bytes, message: FromHost) -> None:
        host = self._hosts.get(name)
        if isinstance(message, Offer):
            if not hmac.compare_digest(message.key.encode(), self._key):
                self._send(name, Refused("the key is wrong; give MOELESS_RANK_KEY the front end's value"))
                return
            if host is None:
                host = self._hosts[name] = _Host(message.num_ranks, 0.0)
            host.heard_s = time.monotonic()
            self._send(name, Alive())
        elif host is not None and message.ticket in host.tickets:
            host.tickets.discard(message.ticket)
            self._codes[message.ticket] = message.code

    def _send(self, name: bytes, message: ToHost) -> None:
        self._socket.send_multipart([name, msgspec.msgpack.encode(message)])
