"""Hostile clients: what is too large, too slow, too deep or too much is refused, and nobody else notices."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from moeless.config.serve import ServeConfig
from moeless.engine.front import Front
from moeless.engine.prometheus import ServiceMetrics
from moeless.engine.server.app import make_app
from moeless.engine.server.errors import ApiError
from moeless.engine.server.guard import Guard
from moeless.engine.server.service import Service
from moeless.errors import UsageError
from tests.engine.server.running import MODEL, RunningServer, running

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import abuse
from mutations import Attack, make_attack

KEY = "secret"


@pytest.fixture(scope="module")
def strict(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with little patience and small bodies."""
    args = ["--body-timeout", "1", "--max-body-mb", "0.2"]
    with running(demo_model, tmp_path_factory.mktemp("strict"), *args) as server:
        yield server


@pytest.fixture
def client(strict: RunningServer) -> Iterator[httpx.Client]:
    with strict.client() as client:
        yield client


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


def guarded(**options: Any) -> Guard:
    config = ServeConfig(model="m", served_model_name=[MODEL])
    metrics = ServiceMetrics(MODEL, expert_detail=True)
    app = make_app(Service(config=config, front=Front(config, metrics), metrics=metrics))
    return Guard(app, **{"api_keys": [KEY], "max_body_bytes": 1_000, "body_timeout_s": 5.0, **options})


def test_the_key_guards_every_route_but_health() -> None:
    """All that the application has, so that a new one can't be forgotten; also paths that are nowhere."""
    guard = guarded()
    routes = [r for r in guard._app.routes if isinstance(r, Route)]  # type: ignore[attr-defined]
    calls = [(method, route.path) for route in routes for method in sorted(route.methods or ())]
    assert len(calls) > 15

    async def statuses(headers: dict[str, str]) -> dict[tuple[str, str], int]:
        transport = httpx.ASGITransport(guard, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            answers = {call: await client.request(*call) for call in [*calls, ("GET", "/no"), ("PUT", "/health/x")]}
            return {call: answer.status_code for call, answer in answers.items()}

    open_calls = {call for call, status in asyncio.run(statuses({})).items() if status != 401}
    assert open_calls == {call for call in calls if call[1] in ("/health", "/ready")}
    assert open_calls
    wrong = asyncio.run(statuses({"Authorization": f"Bearer {KEY}x"}))
    assert {call for call, status in wrong.items() if status != 401} == open_calls
    assert 401 not in asyncio.run(statuses({"Authorization": f"Bearer {KEY}"})).values()


async def _post(guard: Guard, parts: list[bytes]) -> tuple[int, dict[bytes, bytes], bytes]:
    """What the guard answers to a body in these parts; an empty part is a client that goes."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(60)
        part = parts.pop(0)
        return {"type": "http.request" if part else "http.disconnect", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await guard(scope, receive, send)  # type: ignore[arg-type]
    if not sent:
        return 0, {}, b""
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent[1:])


def test_all_bodies_together_are_bounded() -> None:
    """Eight of the largest may be there at once; one more is told to come back, and room is given back."""

    async def check() -> None:
        started, go = asyncio.Event(), asyncio.Event()
        num_started = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal num_started
            num_started += 1
            if num_started == 8:
                started.set()
            await go.wait()

        guard = Guard(app, api_keys=[KEY], max_body_bytes=1_000, body_timeout_s=5)
        waiting = [asyncio.create_task(_post(guard, [b"x" * 1_000])) for _ in range(8)]
        await started.wait()
        status, headers, body = await _post(guard, [b"x"])
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert json.loads(body)["error"]["code"] == "queue_full"
        assert (await _post(guard, [b"x" * 600, b""]))[0] == 503
        go.set()
        await asyncio.gather(*waiting)
        assert guard._held_bytes == 0
        assert (await _post(guard, [b"x" * 600, b""]))[0] == 0  # a client that goes inside its body
        assert (await _post(guard, [b"x" * 600, b"x" * 600]))[0] == 413
        assert guard._held_bytes == 0

    asyncio.run(check())


def test_an_overloaded_server_reads_no_request() -> None:
    """Nor does it break off the connection: the body was taken in."""

    async def check() -> None:
        paths: list[str] = []

        def refuse(path: str) -> ApiError | None:
            paths.append(path)
            return ApiError(503, "full", retry_after_s=1)

        guard = guarded(refuse=refuse)
        status, headers, _ = await _post(guard, [b"{not ", b"JSON"])
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert b"connection" not in headers
        assert paths == ["/v1/completions"]
        assert guard._held_bytes == 0

    asyncio.run(check())


def test_a_body_that_comes_too_slowly() -> None:
    async def check() -> tuple[int, int]:
        guard = guarded(body_timeout_s=0.05)
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            async def drops() -> Any:
                yield b"{"
                await asyncio.sleep(30)

            answer = await client.post("/v1/completions", content=drops(), headers={"Authorization": f"Bearer {KEY}"})
        return answer.status_code, guard._held_bytes

    assert asyncio.run(check()) == (408, 0)


@pytest.mark.parametrize("head", [b"", b"GET /health HTT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_request_that_never_begins_is_hung_up_on(strict: RunningServer, head: bytes) -> None:
    with connect(strict) as raw:
        raw.sendall(head)
        assert raw.recv(1_000) == b""  # within the socket's 30 s; uvicorn alone would wait for ever


def test_slow_heads_do_not_disturb_a_kept_connection(strict: RunningServer) -> None:
    """The time is that of a head, not of a connection: an answer may take longer, and another request follow."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 300, "temperature": 0, "ignore_eos": True}).encode()
    with connect(strict) as raw:
        for _ in range(2):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            answer = b""
            while b'"total_tokens"' not in answer:
                part = raw.recv(65_536)
                assert part, answer[:300]
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")


def test_a_body_that_stops_is_a_408(strict: RunningServer) -> None:
    with connect(strict) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert raw.recv(12) == b"HTTP/1.1 408"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b'{"prompt": "x", "a": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", 400, None),
        ("/v1/completions", json.dumps({"prompt": [[5]] * 3_000}).encode(), 400, "prompt"),
        ("/v1/completions", json.dumps({"prompt": ["x"] * 3_000}).encode(), 400, "prompt"),
        ("/v1/completions", json.dumps({"prompt": "x", "n": 10**6}).encode(), 400, "n"),
        ("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 10**9}).encode(), 400, "prompt"),
        ("/v1/completions", json.dumps({"prompt": "x", "stop": ["y"] * 10_000}).encode(), 400, "stop"),
        ("/v1/completions", json.dumps({"prompt": "x", "stop": "y" * 10_000}).encode(), 400, "stop"),
        ("/v1/completions", json.dumps({"prompt": "x", "stop_token_ids": [5] * 9_999}).encode(), 400, "stop_token_ids"),
        (
            "/v1/completions",
            json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(9_999)}}).encode(),
            400,
            "logit_bias",
        ),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "prompt": "y", "prompt": 7}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400, None),
        ("/v1/completions", b'{"prompt": "x", "temperature": -Infinity}', 400, "temperature"),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user"}] * 20_000}).encode()[:199_000], 400, None),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "u", "content": "\ud800"}]}).encode(), 400, "*"),
        ("/detokenize", json.dumps({"tokens": [-1]}).encode(), 400, "tokens[0]"),
        ("/v1/completions", b'{"prompt": "' + b"x" * 300_000 + b'"}', 413, None),
        ("/scale", b'{"ep": 9}', 409, "ep"),
        ("/scale", b'{"ep": 1023}', 409, "ep"),
        ("/scale", b'{"ep": 0}', 400, "ep"),
    ],
)
def test_too_much_of_anything(client: httpx.Client, path: str, body: bytes, status: int, param: str | None) -> None:
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param == "*" or error["param"] == param


def test_what_nobody_reads_is_not_kept() -> None:
    """Parsed junk takes many times the memory of its body, and a request may run for minutes."""
    from moeless.engine.server.schemas import ChatBody, CompletionBody

    body = {"prompt": "x", "junk": [{}] * 9, "tools": [1], "stream_options": {"junk": [{}]}}
    parsed = CompletionBody.model_validate(body)
    assert set(body) == {"prompt", "tools", "stream_options"}
    assert parsed.model_extra == {"tools": [1]}
    message = {"role": "user", "junk": [{}], "content": [{"type": "text", "text": "x", "junk": [{}]}]}
    ChatBody.model_validate({"messages": [message]})
    assert message == {"role": "user", "content": [{"type": "text", "text": "x"}]}


def test_more_ranks_than_a_host_bears() -> None:
    assert ServeConfig(model="m").most_ranks == 8
    assert ServeConfig(model="m", ep=16).most_ranks == 16
    assert ServeConfig(model="m", ep=2, max_ep=3).most_ranks == 3
    with pytest.raises(UsageError, match="--max-ep 2 is less than --ep 4"):
        ServeConfig(model="m", ep=4, max_ep=2)


def test_mutated_requests(server: RunningServer) -> None:
    """A few hundred of `benchmarks/abuse.py`, always the same: no five-hundred, right tokens for everyone else."""
    args = argparse.Namespace(requests=300, connections=8, slow=2, seed=1, url=server.url)
    result = asyncio.run(abuse.attack_all(server.url, args))
    assert result["failures"] == []
    assert result["alive"]
    assert result["right_at_the_end"]
    assert {"200", "400"} <= set(result["statuses"])
    assert "Traceback" not in server.log


def test_attacks_depend_on_their_seed_only() -> None:
    def wires(seed: int) -> list[bytes]:
        return [make_attack(random.Random(f"{seed}.{i}")).wire for i in range(50)]

    assert wires(1) == wires(1)
    assert wires(1) != wires(2)


@pytest.mark.parametrize(
    ("kind", "status", "headers", "body", "fails"),
    [
        ("json", 500, {}, b"", True),
        ("json", 502, {}, b"", True),
        ("json", 503, {}, b"", True),
        ("json", 503, {"retry-after": "1"}, b"", False),
        ("json", 400, {}, b"oops", True),
        ("json", 400, {}, b'{"error": {"message": "", "type": "", "param": "", "code": ""}}', False),
        ("protocol", 400, {}, b"Invalid HTTP request received.", False),
        ("valid", 200, {}, b'{"choices": [{"text": "right"}]}', False),
        ("valid", 200, {}, b'{"choices": [{"text": "wrong"}]}', True),
        ("valid", 400, {}, b'{"error": {"message": "", "type": "", "param": "", "code": ""}}', True),
        ("valid", 0, {}, b"", True),
        ("json", 200, {}, b'data: {"error": {"type": "server_error"}}', True),
    ],
)
def test_what_counts_as_a_failure(kind: str, status: int, headers: dict[str, str], body: bytes, fails: bool) -> None:
    tally = abuse.Tally("right")
    tally.count(0, Attack(kind=kind, wire=b"", is_valid=kind == "valid"), status, headers, body)
    assert tally.num_failed == fails
