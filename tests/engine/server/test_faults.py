"""Ranks that die, hang, come and go while requests run: tokens stay, nothing fails, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from moeless.engine.routed_experts import from_npy
from tests.engine.routed import check_routes
from tests.engine.server.running import RunningServer, running, wait_for
from tests.engine.server.test_server_life import Stream, text_of
from tests.engine.serving import random_prompts

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
HEARTBEAT_S = 4.0
BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 80},
    {"prompt": "The weather", "max_tokens": 80, "temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
    {"prompt": "Hello", "max_tokens": 80, "temperature": 0.7, "top_p": 0.9, "seed": 4},
    {"prompt": "A list is", "max_tokens": 80, "logprobs": 1},
]


@pytest.fixture(scope="module")
def team(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Three ranks with small steps, so that a long prompt takes many."""
    args = ["--ep", "3", "--heartbeat-timeout", f"{HEARTBEAT_S:g}", "--max-num-batched-tokens", "32"]
    with running(demo_model, tmp_path_factory.mktemp("team"), *args) as server:
        yield server


@pytest.fixture
def client(team: RunningServer) -> Iterator[httpx.Client]:
    with team.client() as client:
        yield client
        until_ranks(client, 3)


@pytest.fixture(scope="module")
def expected(team: RunningServer) -> list[str]:
    with team.client() as client:
        return [text_of(client, **body) for body in BODIES]


def until_ranks(client: httpx.Client, num_ranks: int) -> None:
    wait_for(lambda: client.get("/health").json().get("ranks") == num_ranks, 120)


def begin(client: httpx.Client) -> list[Stream]:
    """One stream of each body, each with a token; more than one on every rank of three at least for one."""
    streams = [Stream(client, **body) for body in BODIES]
    for stream in streams:
        stream.began.wait(120)
    return streams


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_mid_stream(
    team: RunningServer, client: httpx.Client, expected: list[str], victim: int
) -> None:
    before = team.metric("moeless:generation_tokens_total", client)
    recoveries = team.metric("moeless:recovery_seconds_count", client)
    survivors = team.rank_pids()
    streams = begin(client)
    os.kill(survivors.pop(victim), signal.SIGKILL)
    assert [stream.finish() for stream in streams] == expected
    until_ranks(client, 3)
    assert team.rank_pids()[:2] == survivors  # they kept their weights, or they would be new ones
    assert team.metric("moeless:generation_tokens_total", client) == before + sum(b["max_tokens"] for b in BODIES)
    assert team.metric("moeless:recovery_seconds_count", client) == recoveries + 1
    assert team.metric("moeless:ep_ranks", client, state="alive") == 3
    assert team.metric("moeless:ep_ranks", client, state="joining") == 0


def test_routed_experts_after_a_rank_was_killed(team: RunningServer, client: httpx.Client, demo_model: Path) -> None:
    """What survivors compute again is routed again: every token is there once."""
    token, num_tokens = 300, 80
    asked: dict[str, Any] = {"max_tokens": num_tokens, "logit_bias": {str(token): 100}, "return_routed_experts": True}
    prompts = random_prompts((30, 50, 70), 4096)
    streams = [Stream(client, prompt=prompt, **asked) for prompt in prompts]
    for stream in streams:
        stream.began.wait(120)
    os.kill(team.rank_pids()[1], signal.SIGKILL)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    for prompt, stream in zip(prompts, streams, strict=True):
        stream.finish()
        content = b64decode(stream.events[-1]["choices"][0]["routed_experts"])
        check_routes(model, prompt + [token] * (num_tokens - 1), from_npy(content))


def test_a_rank_killed_while_prompts_are_computed(team: RunningServer, client: httpx.Client) -> None:
    bodies = [{"prompt": [token] * 1_800, "max_tokens": 4} for token in (5, 6, 7)]  # 57 steps each
    expected = [text_of(client, **body) for body in bodies]
    streams = [Stream(client, **body) for body in bodies]
    wait_for(lambda: team.metric("moeless:num_requests_running", client) == 3, 30)
    assert not any(stream.events for stream in streams)
    os.kill(team.rank_pids()[1], signal.SIGKILL)
    assert not any(stream.events for stream in streams)
    assert [stream.finish() for stream in streams] == expected


def test_a_second_rank_dies_while_the_next_group_forms(
    team: RunningServer, client: httpx.Client, expected: list[str]
) -> None:
    streams = begin(client)
    pids = team.rank_pids()
    os.kill(pids[0], signal.SIGSTOP)  # the group of the survivors cannot form without it
    os.kill(pids[2], signal.SIGKILL)
    wait_for(lambda: "rank 2 died" in team.log, 20)
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGKILL)
    assert [stream.finish() for stream in streams] == expected


def test_all_ranks_die_at_once(team: RunningServer, client: httpx.Client, expected: list[str]) -> None:
    streams = begin(client)
    for pid in team.rank_pids():
        os.kill(pid, signal.SIGKILL)
    unhealthy = wait_for(lambda: (r := client.get("/health")).status_code == 503 and r, 10)
    assert unhealthy.json()["error"]["code"] == "rescaling"
    assert client.get("/ready").status_code == 503
    assert [stream.finish() for stream in streams] == expected


def test_a_replacement_that_dies_while_it_loads_is_replaced(team: RunningServer, client: httpx.Client) -> None:
    before = team.rank_pids()
    os.kill(before[1], signal.SIGKILL)
    newcomer = wait_for(lambda: set(team.rank_pids()) - set(before), 10).pop()
    os.kill(newcomer, signal.SIGKILL)
    until_ranks(client, 3)
    assert newcomer not in team.rank_pids()


def test_a_stopped_rank_is_told_from_those_that_wait_for_it(
    team: RunningServer, client: httpx.Client, expected: list[str]
) -> None:
    lost = {
        reason: team.metric("moeless:rank_failures_total", client, reason=reason) for reason in ("death", "silence")
    }
    pids = team.rank_pids()
    streams = begin(client)
    begin_s = time.monotonic()
    os.kill(pids[0], signal.SIGSTOP)
    wait_for(lambda: pids[0] not in team.rank_pids(), HEARTBEAT_S + 10)
    assert time.monotonic() - begin_s >= HEARTBEAT_S - 1  # a pulse may be half a second old
    assert [stream.finish() for stream in streams] == expected
    until_ranks(client, 3)
    assert team.rank_pids()[:2] == pids[1:]
    assert team.metric("moeless:rank_failures_total", client, reason="silence") == lost["silence"] + 1
    assert team.metric("moeless:rank_failures_total", client, reason="death") == lost["death"]


def test_scaling_under_load_fails_no_request(team: RunningServer, client: httpx.Client, expected: list[str]) -> None:
    failures = team.metric("moeless:rank_failures_total", client)
    is_over, texts = threading.Event(), []

    def load(number: int) -> None:
        with team.client() as own:
            while not is_over.is_set():
                texts.append((number, text_of(own, **BODIES[number])))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(len(BODIES))]
    for thread in threads:
        thread.start()
    try:
        for num_ranks in (1, 2, 4, 3):
            answer = client.post("/scale", json={"ep": num_ranks})
            assert answer.status_code == 200, answer.text
            assert answer.json()["ep"] == client.get("/health").json()["ranks"] == num_ranks
            assert len(team.rank_pids()) == num_ranks or num_ranks == 3  # those that leave may take a moment
    finally:
        is_over.set()
        for thread in threads:
            thread.join(120)
    assert len(texts) > len(BODIES)
    assert all(text == expected[number] for number, text in texts)
    assert team.metric("moeless:rank_failures_total", client) == failures
    wait_for(lambda: len(team.rank_pids()) == 3, 10)


def test_scale_refuses_what_it_cannot_do(team: RunningServer, client: httpx.Client) -> None:
    for wrong in ({"ep": 0}, {"ep": 1_025}, {"ep": "2"}, {"ep": True}, {"ep": 1.5}, {"ep": None}, {}):
        answer = client.post("/scale", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ep"), wrong
    assert client.post("/scale", json={"ep": 3}).json()["ep"] == 3  # nothing to do
    grow = threading.Thread(target=client.post, args=("/scale",), kwargs={"json": {"ep": 4}})
    grow.start()
    with team.client() as other:
        wait_for(lambda: len(team.rank_pids()) == 4, 20)
        answer = other.post("/scale", json={"ep": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_scale")
        grow.join(120)
        assert other.get("/health").json()["ranks"] == 4
        assert other.post("/scale", json={"ep": 3}).status_code == 200


def test_shrink_goes_on_down_to_one_rank_and_ends_with_it(demo_model: Path, tmp_path: Path) -> None:
    with (
        running(demo_model, tmp_path, "--ep", "3", "--on-rank-failure", "shrink") as server,
        server.client() as client,
    ):
        expected = [text_of(client, **body) for body in BODIES]
        for victim, num_left in ((0, 2), (1, 1)):
            streams = begin(client)
            os.kill(server.rank_pids()[victim], signal.SIGKILL)
            assert [stream.finish() for stream in streams] == expected
            assert client.get("/health").json() == {"status": "ok", "ranks": num_left}
            assert len(server.rank_pids()) == num_left
        streams = begin(client)
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        for stream in streams:
            stream._thread.join(60)
            assert stream.events[-1]["error"]["code"] == "engine_error"
        assert server.process.wait(60) == 1
        assert "it was the last" in server.log


def test_one_whole_model_grows_into_a_group(demo_model: Path, tmp_path: Path) -> None:
    """A rank that serves alone has all experts built in; it serves until two that share them have loaded."""
    with running(demo_model, tmp_path, "--ep", "1") as server, server.client() as client:
        expected = [text_of(client, **body) for body in BODIES]
        (whole,) = server.rank_pids()
        streams = begin(client)
        assert client.post("/scale", json={"ep": 2}).status_code == 200
        assert [stream.finish() for stream in streams] == expected
        assert [text_of(client, **body) for body in BODIES] == expected
        wait_for(lambda: whole not in server.rank_pids(), 10)
        assert client.get("/health").json()["ranks"] == 2
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        assert [text_of(client, **body) for body in BODIES] == expected
        assert server.stop() == 0
