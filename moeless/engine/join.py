"""`moeless join`: lends ranks of this host to a front end on another one."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import FrameType

import msgspec
import zmq

from moeless.config.join import JoinConfig
from moeless.engine.hosts import Alive, Ended, FromHost, Kill, Offer, Refused, Start, ToHost
from moeless.engine.launch import num_threads, start_rank
from moeless.errors import RankError

log = logging.getLogger("moeless")

_OFFER_S, _POLL_MS = 1.0, 100


def run_join(config: JoinConfig) -> None:
    """Start ranks for the front end as it asks for them, until it goes or a signal comes; then none is left here.

    Raises:
        RankError: the front end refuses this host, or has been silent for too long.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, _interrupt)
    lender = _Lender(config)
    try:
        while True:
            lender.turn()
    finally:
        lender.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Lender:
    """The rank processes of this host by their ticket."""

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._offer = Offer(os.environ.get("MOELESS_RANK_KEY", ""), config.ranks)
        self._decode = msgspec.msgpack.Decoder(ToHost).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(12))
        self._socket.connect(f"tcp://{config.address}")
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._seats: dict[int, int] = {}
        self._offered_s = 0.0
        self._heard_s: float | None = None
        self._begin_s = time.monotonic()

    def turn(self) -> None:
        """Offer when it is time, take one message, and report what has ended."""
        now_s = time.monotonic()
        if now_s - self._offered_s >= _OFFER_S:
            self._offered_s = now_s
            self._send(self._offer)
        if self._socket.poll(_POLL_MS):
            self._take(self._decode(self._socket.recv()))
        for ticket, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                self._forget(ticket)
                self._send(Ended(ticket, code))
        limit_s = self._config.start_timeout if self._heard_s is None else self._config.front_timeout
        if time.monotonic() - (self._heard_s or self._begin_s) > limit_s:
            raise RankError(f"no front end answers at {self._config.address} for {limit_s:g} s")

    def close(self) -> None:
        """Kill the ranks."""
        for ticket, process in list(self._processes.items()):
            process.kill()
            process.wait()
            self._forget(ticket)
        self._socket.close(linger=0)

    def _take(self, message: ToHost) -> None:
        if self._heard_s is None and isinstance(message, Alive):
            log.info("joined the front end at %s with %d rank(s)", self._config.address, self._config.ranks)
        self._heard_s = time.monotonic()
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Kill) and message.ticket in self._processes:
            self._processes[message.ticket].kill()
        elif isinstance(message, Refused):
            raise RankError(f"the front end at {self._config.address} refuses this host: {message.reason}")

    def _start(self, message: Start) -> None:
        """On a seat that is free here; the front end's numbers run over all hosts."""
        seat = min(set(range(len(self._seats) + 1)) - set(self._seats.values()))
        order = replace(message.order, seat=seat, num_threads=num_threads(self._config.ranks))
        self._processes[message.ticket] = start_rank(order)
        self._seats[message.ticket] = seat

    def _forget(self, ticket: int) -> None:
        process = self._processes.pop(ticket)
        del self._seats[ticket]
        if process.stdin is not None:
            process.stdin.close()

    def _send(self, message: FromHost) -> None:
        self._socket.send(msgspec.msgpack.encode(message))
