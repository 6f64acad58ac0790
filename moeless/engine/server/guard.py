"""What every request passes first: its key, and a body that is neither too large nor too slow.

Bodies are kept until their answer is sent, so all that are there at once are bounded too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeless.engine.server.errors import ApiError, error_response

_OPEN_PATHS = ("/health", "/ready")
_NUM_LARGEST = 8
"""Bodies of the largest size that may be there at once; or as many bytes of smaller ones."""
_LINGER_S = 2.0
"""How long a refused body is read and dropped."""


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        max_body_bytes: int,
        body_timeout_s: float,
        refuse: Callable[[str], ApiError | None] = lambda path: None,
    ) -> None:
        """`refuse` may say why a POST to a path is not even looked at: an overloaded server has no time for it."""
        self._app, self._refuse = app, refuse
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id")
        if request_id is not None and len(request_id) <= 256:
            send = _with_header(send, b"x-request-id", request_id)
        body = bytearray()
        try:
            if scope["path"] not in _OPEN_PATHS:
                self._check_key(headers.get(b"authorization", b""))
            if scope["method"] not in ("GET", "HEAD"):
                receive = await self._read(headers, receive, body)
                if (refusal := self._refuse(scope["path"])) is not None:
                    await error_response(refusal)(scope, receive, send)
                    return
        except ApiError as error:
            response = error_response(error)
            response.headers["Connection"] = "close"
            if body or b"expect" not in headers:  # who waits for "100 Continue" sends nothing after a refusal
                send = _lingering(receive, send)
            await response(scope, receive, send)
        except _GoneError:
            return
        else:
            await self._app(scope, receive, send)
        finally:
            self._held_bytes -= len(body)

    def _check_key(self, authorization: bytes) -> None:
        """Compare with every key in constant time."""
        if not self._keys:
            return
        scheme, _, given = authorization.partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive, body: bytearray) -> Receive:
        """Read the whole body into `body`; a `receive` that gives it again and then goes on as before."""
        too_large = ApiError(413, f"the body is over {self._max_body_bytes} bytes", code="body_too_large")
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    body += part
                    self._held_bytes += len(part)
                    if len(body) > self._max_body_bytes:
                        raise too_large
                    if self._held_bytes > _NUM_LARGEST * self._max_body_bytes:
                        reason = "too many large bodies at once; send it again in a moment"
                        raise ApiError(503, reason, kind="overloaded_error", code="queue_full", retry_after_s=1)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(408, f"the body took more than {self._body_timeout_s:g} s", code="body_timeout") from None
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return again


class _GoneError(Exception):
    """The client went before its request was whole."""


def _lingering(receive: Receive, send: Send) -> Send:
    """A `send` whose answer reaches a client that still sends: closing on unread bytes resets the connection."""

    async def drop_rest() -> None:
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass

    async def sending(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body"):
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await drop_rest()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return sending


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (name, value)]}
        await send(message)

    return sending
