"""A server's life: loading, keys, a full queue, lost ranks, draining, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.server.running import MODEL, RunningServer, events, running, wait_for

pytestmark = pytest.mark.timeout(600)
KEY = "secret"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two ranks that take two sequences each, and two more completions that wait."""
    args = [
        "--ep",
        "2",
        "--max-num-seqs",
        "2",
        "--max-num-queued-reqs",
        "2",
        "--api-key",
        KEY,
        "--heartbeat-timeout",
        "120",
    ]
    with running(demo_model, tmp_path_factory.mktemp("pair"), *args) as server:
        yield server


@pytest.fixture
def client(pair: RunningServer) -> Iterator[httpx.Client]:
    with pair.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


class Stream:
    """A stream read by a thread; `began` is set at its first token."""

    def __init__(self, client: httpx.Client, **body: Any) -> None:
        self.began = threading.Event()
        self.events: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._client, self._body = client, {**GREEDY, "stream": True, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._client.stream("POST", "/v1/completions", json=self._body) as response:
                for event in events(response):
                    self.events.append(event)
                    self.began.set()
        except BaseException as error:
            self.error = error
        finally:
            self.began.set()

    def finish(self) -> str:
        """Its text, once it has ended as it should."""
        self._thread.join(120)
        assert self.error is None, self.error
        assert self.events[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(event["choices"][0]["text"] for event in self.events)


def text_of(client: httpx.Client, **body: Any) -> str:
    response = client.post("/v1/completions", json={**GREEDY, **body})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_the_key_guards_everything_but_health(pair: RunningServer) -> None:
    with pair.client() as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/version", "/nothing"):
            assert stranger.get(path).status_code == 401
        for wrong in ("Bearer", "Bearer wrong", f"Basic {KEY}", KEY):
            response = stranger.post("/v1/completions", json={"prompt": "x"}, headers={"Authorization": wrong})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"


def test_expert_metrics_of_two_ranks_add_up(pair: RunningServer, client: httpx.Client) -> None:
    names = ("expert_tokens_total", "rank_tokens_total", "moe_layer_forward_seconds_count")
    before = {name: pair.metric(f"moeless:{name}", client) for name in names}
    warm = pair.metric("moeless:expert_starts_total", client, kind="warm")
    body = {**GREEDY, "prompt": [[5] * 30, [6] * 10, [7] * 3], "max_tokens": 6}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 18
    gained = {name: pair.metric(f"moeless:{name}", client) - before[name] for name in names}
    pairs = (43 + 3 * 5) * 2 * 12
    assert gained["expert_tokens_total"] == gained["rank_tokens_total"] == pairs
    assert gained["moe_layer_forward_seconds_count"] % 12 == 0
    assert pair.metric("moeless:expert_starts_total", client, kind="warm") > warm
    assert pair.metric("moeless:balancedness", client, stage="observed", layer="3") >= 1
    assert pair.metric("moeless:expert_replicas_per_layer", client, layer="3") >= 16
    assert pair.metric("moeless:ep_ranks", client, state="alive") == 2


def test_a_full_queue_says_so_and_when_to_come_back(pair: RunningServer, client: httpx.Client) -> None:
    streams = [Stream(client, prompt="Hello", max_tokens=500) for _ in range(6)]
    held, deadline = 0.0, time.monotonic() + 60
    while held < 6 and time.monotonic() < deadline:
        held = sum(pair.metric(f"moeless:num_requests_{state}", client) for state in ("running", "waiting"))
    response = client.post("/v1/completions", json={**GREEDY, "prompt": "Hello", "max_tokens": 1})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "overloaded_error"
    assert response.json()["error"]["code"] == "queue_full"
    assert len({stream.finish() for stream in streams}) == 1
    assert pair.metric("moeless:admission_rejections_total", client, reason="queue_full") == 1
    too_many = client.post("/v1/completions", json={"prompt": "Hello", "n": 7})
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_a_pause(pair: RunningServer, client: httpx.Client, victim: int) -> None:
    """Streams go on with the tokens they would have had, sampled ones too, and counters never fall."""
    bodies = [
        {"prompt": "Once upon a time", "max_tokens": 60},
        {"prompt": "The weather", "max_tokens": 60, "temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
        {"prompt": "Hello", "max_tokens": 60, "logprobs": 1},
    ]
    expected = [text_of(client, **body) for body in bodies]
    counters = ("moeless:expert_tokens_total", "moeless:generation_tokens_total", "moeless:expert_starts_total")
    before = [pair.metric(name, client) for name in counters]
    failures = pair.metric("moeless:rank_failures_total", client)
    streams = [Stream(client, **body) for body in bodies]
    for stream in streams:
        stream.began.wait(120)
    os.kill(pair.rank_pids()[victim], signal.SIGKILL)
    assert [stream.finish() for stream in streams] == expected
    wait_for(lambda: client.get("/health").json() == {"status": "ok", "ranks": 2}, 60)
    assert pair.metric("moeless:rank_failures_total", client) == failures + 1
    after = [pair.metric(name, client) for name in counters]
    assert all(new > old for new, old in zip(after, before, strict=True))
    assert after[1] - before[1] == 180  # no token was counted twice


def test_a_stopped_rank_is_taken_for_dead(demo_model: Path, tmp_path: Path) -> None:
    with running(demo_model, tmp_path, "--heartbeat-timeout", "8") as server, server.client() as client:
        body = {"prompt": "Once upon a time", "max_tokens": 60}
        expected = text_of(client, **body)
        stream = Stream(client, **body)
        stream.began.wait(120)
        os.kill(server.rank_pids()[0], signal.SIGSTOP)
        assert stream.finish() == expected
        assert server.metric("moeless:rank_failures_total", client, reason="silence") == 1
        assert "has said nothing for 8 s" in server.log


def test_loading_draining_and_the_end(demo_model: Path, tmp_path: Path) -> None:
    with RunningServer(demo_model, tmp_path, "--host", "0.0.0.0", "--shutdown-timeout", "100") as server:
        port = int(server.wait_listening().rpartition(":")[2])
        server.url = f"http://127.0.0.1:{port}"
        with server.client() as client:
            assert client.get("/health").status_code == 503
            early = client.post("/v1/completions", json={"prompt": "x"})
            assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
            assert "retry-after" in early.headers
            assert "no --api-key is set" in server.log
            server.wait_ready()
            streams = [Stream(client, prompt="Hello", max_tokens=100) for _ in range(2)]
            for stream in streams:
                stream.began.wait(120)
            os.kill(server.process.pid, signal.SIGTERM)
            refused = wait_for(lambda: (r := client.get("/ready")).status_code == 503 and r, 10)
            assert refused.json()["error"]["code"] == "draining"
            late = client.post("/v1/completions", json={"prompt": "x"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            assert len({stream.finish() for stream in streams}) == 1
            assert server.process.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_second_signal_ends_it_at_once(demo_model: Path, tmp_path: Path) -> None:
    with running(demo_model, tmp_path) as server, server.client() as client:
        stream = Stream(client, prompt="Hello", max_tokens=1500)
        stream.began.wait(120)
        os.kill(server.process.pid, signal.SIGINT)
        wait_for(lambda: client.get("/ready").status_code == 503, 10)
        assert server.stop(signal.SIGINT, limit_s=30) == 0
        stream._thread.join(30)
        assert stream.error is None  # it got its end
        assert stream.events[-1]["choices"][0]["finish_reason"] == "abort"


def test_exit_on_rank_failure_ends_streams_with_an_error(demo_model: Path, tmp_path: Path) -> None:
    with running(demo_model, tmp_path, "--on-rank-failure", "exit") as server, server.client() as client:
        stream = Stream(client, prompt="Hello", max_tokens=1500)
        stream.began.wait(120)
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        stream._thread.join(60)
        assert stream.error is None
        assert stream.events[-1]["error"]["code"] == "engine_error"
        assert server.process.wait(60) == 1
        assert "moeless: rank 0 died (signal SIGKILL)" in server.log


def test_start_is_all_or_nothing(tmp_path: Path, demo_model: Path) -> None:
    with RunningServer(tmp_path, tmp_path) as server:
        assert server.process.wait(120) == 1
        assert server.log.splitlines()[-1].startswith("moeless: ")
        assert "config.json" in server.log
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with RunningServer(demo_model, tmp_path, "--port", str(taken.getsockname()[1])) as server:
            assert server.process.wait(60) == 1
            assert "cannot listen at 127.0.0.1" in server.log


def test_ranks_end_with_a_killed_front(pair: RunningServer) -> None:
    """The last test of the pair."""
    assert len(pair.rank_pids()) == 2
    pair.stop(signal.SIGKILL)  # waits until the ranks are gone
