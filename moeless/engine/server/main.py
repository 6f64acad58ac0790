"""The front end's process: starts the ranks, answers, and ends without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from moeless.config.serve import ServeConfig
from moeless.engine.front import Front
from moeless.engine.prometheus import ServiceMetrics
from moeless.engine.server.app import make_app
from moeless.engine.server.connection import HeadTimeoutProtocol
from moeless.engine.server.guard import Guard
from moeless.engine.server.prompts import Prompts
from moeless.engine.server.service import Service
from moeless.models.checkpoint import load_tokenizer

log = logging.getLogger("moeless")


async def serve(config: ServeConfig, listener: socket.socket, address: str) -> None:
    """Serve at `listener` until SIGTERM or SIGINT. Errors as in `run_serve`."""
    metrics = ServiceMetrics(config.model_names[0], expert_detail=config.metrics_expert_detail)
    front = Front(config, metrics)
    service = Service(config=config, front=front, metrics=metrics, created_s=int(time.time()))
    server = _Server(_uvicorn_config(config, service))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    engine = asyncio.create_task(front.run())
    end = asyncio.create_task(_end_on_signal(front, config.shutdown_timeout))
    start = asyncio.create_task(_announce(service, address))
    try:
        await asyncio.wait({http, engine, end, start}, return_when=asyncio.FIRST_COMPLETED)
        if start.done() and not start.cancelled():
            start.result()
            await asyncio.wait({http, engine, end}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        start.cancel()
        front.stop()
        engine.cancel()
        server.should_exit = True
        if service.prompts is not None:
            service.prompts.close()
        await asyncio.wait({engine, http}, timeout=10)
        end.cancel()
    if not engine.cancelled():
        engine.result()


async def _announce(service: Service, address: str) -> None:
    """Load the tokenizer beside the ranks, wait for them, and say that the service is ready."""
    config, front = service.config, service.front
    tokenizer = await asyncio.to_thread(load_tokenizer, config)
    while front.facts is None:
        await asyncio.sleep(0.02)
    service.prompts = Prompts(tokenizer, front.facts.max_model_len)
    gc.freeze()  # what is loaded stays: a request of millions of objects must not have the collector walk all of it
    if config.json_output:
        print(json.dumps({"url": address, "model": config.model_names[0], "ranks": config.ep}), flush=True)
    log.info(
        "ready at %s: %s, %d rank(s), context %d tokens, %d sequences a rank, %d completions at once",
        address,
        ", ".join(config.model_names),
        config.ep,
        front.facts.max_model_len,
        config.max_seqs,
        config.capacity,
    )


async def _end_on_signal(front: Front, timeout_s: float) -> None:
    """Return after the first signal when all is done or the time is over, and at once on the second."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    first = await signals.get()
    left = front.ledger.num_live
    log.info("%s: %d completion(s) get up to %g s to end", signal.Signals(first).name, left, timeout_s)
    drained = asyncio.create_task(front.drain(timeout_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
    if not (drained.done() and drained.result()):
        log.warning("%d completion(s) are cut off", front.ledger.num_live)
    drained.cancel()
    again.cancel()


class _Server(uvicorn.Server):
    """Signals are handled here, not by uvicorn: it would close streams that are to end in peace."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(config: ServeConfig, service: Service) -> uvicorn.Config:
    guard = Guard(
        make_app(service),
        api_keys=config.api_key or (),
        max_body_bytes=round(config.max_body_mb * 1e6),
        body_timeout_s=config.body_timeout,
        refuse=service.refusal,
    )
    return uvicorn.Config(
        guard,
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log,
        lifespan="off",
        http=cast(Any, partial(HeadTimeoutProtocol, head_timeout_s=config.body_timeout)),
        h11_max_incomplete_event_size=65_536,
        ws="none",
        timeout_graceful_shutdown=3,
        server_header=False,
        backlog=2_048,
    )
