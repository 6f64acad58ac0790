"""Answers that end when their client goes: event streams, and waiting for a whole answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeless.engine.server.errors import ApiError, error_value, internal_error

log = logging.getLogger("moeless")

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_Result = TypeVar("_Result")


class EventStream(Response):
    """Server-sent events. On every path it ends with `[DONE]`, after an error event if something went wrong."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], release: Callable[[], None], keep_alive_s: float) -> None:
        """`release` is called at the end, also when the client has gone before the first event."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._release, self._keep_alive_s = events, release, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client goes."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(self._write(send)),
                asyncio.ensure_future(_until_gone(receive)),
            ]
            if self._keep_alive_s:
                tasks.append(asyncio.ensure_future(_keep_alive(send, self._keep_alive_s)))
            await _first(tasks)
        finally:
            self._release()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self._events:
                await _send_part(send, b"data: " + _encode(event) + b"\n\n")
        except ApiError as error:
            await _send_part(send, b"data: " + _encode(error_value(error)) + b"\n\n")
        except Exception:
            log.exception("a stream failed")
            await _send_part(send, b"data: " + _encode(error_value(internal_error())) + b"\n\n")
        await send({"type": "http.response.body", "body": _DONE})


async def while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of `work`; None, and `work` is cancelled, when the client goes before."""
    task = asyncio.ensure_future(work)
    await _first([task, asyncio.ensure_future(_until_gone(request.receive))])
    return None if task.cancelled() else task.result()


async def _first(tasks: list[asyncio.Future[Any]]) -> None:
    """Wait until one has ended and cancel the others; raises what the first task raises."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(BaseException):
                await task
    if not tasks[0].cancelled():
        tasks[0].result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _keep_alive(send: Send, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _send_part(send, b": ping\n\n")


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
