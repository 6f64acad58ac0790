"""The line between a front end and its ranks: ZeroMQ, one message a frame; waiting costs no CPU time."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

from moeless.engine.messages import Form, Pulse, Stop, ToFront, ToRank
from moeless.errors import RankError

_encode = msgspec.msgpack.Encoder().encode
_PULSE_S = 0.5
_PULSE_SUFFIX = b"~"


class FrontChannel:
    """The front end's end, to which every rank process connects under its member number."""

    def __init__(self, address: str) -> None:
        """Listen at `address` (`ipc://PATH`, or `tcp://HOST:PORT` for ranks on other hosts)."""
        self._decode = msgspec.msgpack.Decoder(ToFront).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a rank that is not there is an error
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where ranks connect; a port given as * has become a number."""

    def send(self, member: int, message: ToRank) -> None:
        """Send to one process. Raises `RankError` when it is not connected."""
        try:
            self._socket.send_multipart([str(member).encode(), _encode(message)])
        except zmq.ZMQError as error:
            raise RankError(f"rank process {member} is not connected: {error}") from error

    def fileno(self) -> int:
        """What an event loop watches. It tells of changes only: after it and after each send, receive until None."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self, timeout_s: float) -> tuple[int, ToFront] | None:
        """The next message and the member it is from; None after `timeout_s`."""
        if not self._socket.poll(round(timeout_s * 1_000)):
            return None
        identity, payload = self._socket.recv_multipart()
        return int(identity.removesuffix(_PULSE_SUFFIX)), self._decode(payload)

    def close(self) -> None:
        """Drop what is not sent."""
        self._socket.close(linger=0)


class RankChannel:
    """A rank's end. What arrives is kept until it is asked for, in order."""

    def __init__(self, address: str, member: int) -> None:
        self._decode = msgspec.msgpack.Decoder(ToRank).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(member).encode())
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._inbox: deque[ToRank] = deque()

    def send(self, message: ToFront) -> None:
        """Send to the front end."""
        self._socket.send(_encode(message))

    def receive(self, timeout_s: float) -> list[ToRank]:
        """All messages that have arrived up to an order to form a group; waits until there is one or that order.

        Args:
            timeout_s: how long to wait; `math.inf` is without limit.
        """
        self._take_in(timeout_s)
        messages: list[ToRank] = []
        while self._inbox and not isinstance(self._inbox[0], Form):
            messages.append(self._inbox.popleft())
        return messages

    def has_form(self) -> bool:
        """Whether an order to form a group has arrived."""
        self._take_in(0)
        return any(isinstance(message, Form) for message in self._inbox)

    def take_form(self) -> Form | None:
        """Wait for the newest order to form a group; what came before it is dropped. None: told to stop instead."""
        while not self.has_form():
            if any(isinstance(message, Stop) for message in self._inbox):
                return None
            self._inbox.clear()
            self._take_in(math.inf)
        newest = max(i for i, message in enumerate(self._inbox) if isinstance(message, Form))
        for _ in range(newest):
            self._inbox.popleft()
        form = self._inbox.popleft()
        assert isinstance(form, Form), "it has just been found there"
        return form

    def _take_in(self, timeout_s: float) -> None:
        timeout_ms = None if math.isinf(timeout_s) else math.ceil(timeout_s * 1_000)
        while self._socket.poll(0 if self._inbox else timeout_ms):
            self._inbox.append(self._decode(self._socket.recv()))

    def __enter__(self) -> RankChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=2_000)
        zmq.Context.instance().term()  # waits until all is sent, at most as long as the socket lingers


def start_pulse(address: str, member: int, is_waiting: Callable[[], bool]) -> None:
    """Send a `Pulse` twice a second for the rest of the process's life, from a thread and a socket of their own."""

    def beat() -> None:
        socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)  # one context's sockets are closed together
        socket.setsockopt(zmq.IDENTITY, str(member).encode() + _PULSE_SUFFIX)
        socket.connect(address)
        while True:
            socket.send(_encode(Pulse(is_waiting())))
            time.sleep(_PULSE_S)

    threading.Thread(target=beat, name="pulse", daemon=True).start()
