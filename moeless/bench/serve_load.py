"""Sending requests at their times and noting when each token comes back, over OpenAI's streaming endpoints.

Works with any server of that API. Times are this process's clock: they hold the network and the client as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from moeless.errors import RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request: when it is due after the start, its prompt's token ids, and how many tokens it asks for."""

    due_s: float
    prompt: tuple[int, ...]
    num_output: int
    message: str | None = None
    """Sent in place of the ids to the chat endpoint, whose template makes them of it."""
    is_cut: bool = False
    """Whether more was wanted than fits in the context."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """What became of a request. Times are seconds after the start of the run; `token_times_s` has one a token."""

    due_s: float
    num_prompt: int
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_output: int = 0
    text: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What all requests of a run share."""

    model: str
    ignore_eos: bool
    temperature: float
    max_concurrency: int | None
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """All samples in the order of the requests, how long the run took, and the client's own share of a core."""

    samples: list[Sample]
    duration_s: float
    client_cpu_share: float


def api_headers() -> dict[str, str]:
    """The key of MOELESS_API_KEY or OPENAI_API_KEY, if one is set."""
    key = os.environ.get("MOELESS_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def run_load(
    base_url: str,
    requests: Sequence[LoadRequest],
    options: LoadOptions,
    *,
    advance: Callable[[int], None],
    observe: Callable[[httpx.AsyncClient], Any] | None = None,
) -> LoadRun:
    """Send every request when it is due and wait for all.

    Args:
        advance: called with 1 for each request that ends.
        observe: a coroutine function that runs beside the load until it is over.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, headers=api_headers(), limits=limits, timeout=options.timeout_s
    ) as client:
        watcher = asyncio.create_task(observe(client)) if observe is not None else None
        room = asyncio.Semaphore(options.max_concurrency or len(requests))
        samples = [Sample(due_s=request.due_s, num_prompt=len(request.prompt)) for request in requests]
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()

        async def one(request: LoadRequest, sample: Sample) -> None:
            async with room:
                await send(client, request, sample, options, begin_s)
            advance(1)

        tasks = []
        for request, sample in zip(requests, samples, strict=True):
            await asyncio.sleep(begin_s + request.due_s - time.perf_counter())
            tasks.append(asyncio.create_task(one(request, sample)))
        await asyncio.gather(*tasks)
        duration_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
    return LoadRun(samples=samples, duration_s=duration_s, client_cpu_share=cpu_s / duration_s)


async def send(
    client: httpx.AsyncClient, request: LoadRequest, sample: Sample, options: LoadOptions, begin_s: float
) -> None:
    """Stream one completion into `sample`; what goes wrong is its `error`, never raised."""
    if request.message is None:
        path, asked = "/v1/completions", {"prompt": list(request.prompt), "max_tokens": request.num_output}
    else:
        messages = [{"role": "user", "content": request.message}]
        path, asked = "/v1/chat/completions", {"messages": messages, "max_completion_tokens": request.num_output}
    body = {
        "model": options.model,
        **asked,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample.sent_s = time.perf_counter() - begin_s
    try:
        async with asyncio.timeout(options.timeout_s), client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                sample.error = describe_error(answer.status_code, await answer.aread())
            else:
                await _read(answer, sample, begin_s)
    except TimeoutError:
        sample.error = f"no end within {options.timeout_s:g} s"
    except (httpx.HTTPError, ValueError) as error:  # ValueError: an event that is not JSON
        sample.error = f"{type(error).__name__}: {error}".rstrip(": ")
    sample.ended_s = time.perf_counter() - begin_s


async def _read(answer: httpx.Response, sample: Sample, begin_s: float) -> None:
    finished = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        now_s, data = time.perf_counter() - begin_s, line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            sample.error = str(event["error"].get("message", event["error"]))
        for choice in event.get("choices", ()):
            text = _token_text(choice)
            if text is not None:
                sample.token_times_s.append(now_s)
                sample.text += text
            finished |= choice.get("finish_reason") in ("stop", "length")
        if event.get("usage"):
            sample.num_output = event["usage"]["completion_tokens"]
    sample.num_output = sample.num_output or len(sample.token_times_s)
    if sample.error is None and not (finished and sample.token_times_s):
        sample.error = "the stream ended before the completion did"


def _token_text(choice: dict[str, Any]) -> str | None:
    """The text of a chunk's token, which may be empty; None for a chunk without one, such as chat's first, a role."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"]
    content: str | None = delta.get("content")
    return None if "role" in delta and not content else content


def describe_error(status: int, body: bytes) -> str:
    """An error answer in one line: its status and, where it is OpenAI's JSON, its code or message."""
    try:
        error = json.loads(body)["error"]
        return f"{status} {error.get('code') or error['message']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{status} {body[:80].decode(errors='replace')}".strip()


def first_model(client: httpx.Client) -> dict[str, Any]:
    """The first of a server's models. Raises `RankError` when the server does not answer."""
    try:
        answer = client.get("/v1/models")
        answer.raise_for_status()
        model: dict[str, Any] = answer.json()["data"][0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise RankError(f"no model at {client.base_url}: {error}; is a server running there?") from None
    return model
