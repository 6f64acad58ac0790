"""The line between a front end and its ranks: ZeroMQ, one message a frame; waiting costs no CPU time."""

from __future__ import annotations

from types import TracebackType

import msgspec
import zmq

from moeless.engine.messages import ToFront, ToRank
from moeless.errors import RankError

_encode = msgspec.msgpack.Encoder().encode


class FrontChannel:
    """The front end's end, to which every rank connects."""

    def __init__(self, address: str) -> None:
        """Listen at `address` (`ipc://PATH`, or `tcp://HOST:PORT` for ranks on other hosts)."""
        self._decode = msgspec.msgpack.Decoder(ToFront).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a rank that is not there is an error
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where ranks connect; a port given as * has become a number."""

    def send(self, rank: int, message: ToRank) -> None:
        """Send to one rank. Raises `RankError` when it is not connected."""
        try:
            self._socket.send_multipart([str(rank).encode(), _encode(message)])
        except zmq.ZMQError as error:
            raise RankError(f"rank {rank} is not connected: {error}") from error

    def fileno(self) -> int:
        """What an event loop watches. It tells of changes only: after it and after each send, receive until None."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self, timeout_s: float) -> tuple[int, ToFront] | None:
        """The next message and the rank it is from; None after `timeout_s`."""
        if not self._socket.poll(round(timeout_s * 1_000)):
            return None
        rank, payload = self._socket.recv_multipart()
        return int(rank), self._decode(payload)

    def close(self) -> None:
        """Drop what is not sent."""
        self._socket.close(linger=0)


class RankChannel:
    """A rank's end."""

    def __init__(self, address: str, rank: int) -> None:
        self._decode = msgspec.msgpack.Decoder(ToRank).decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, str(rank).encode())
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, message: ToFront) -> None:
        """Send to the front end."""
        self._socket.send(_encode(message))

    def receive(self, *, wait: bool) -> list[ToRank]:
        """All messages that have arrived; at least one if told to wait."""
        messages: list[ToRank] = []
        while self._socket.poll(None if wait and not messages else 0):
            messages.append(self._decode(self._socket.recv()))
        return messages

    def __enter__(self) -> RankChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=2_000)
        zmq.Context.instance().term()  # waits until all is sent, at most as long as the socket lingers
