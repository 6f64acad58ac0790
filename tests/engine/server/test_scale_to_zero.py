"""A service scaled to zero: its experts leave while nobody asks for anything, and no change of ranks loses a token."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.engine.server.running import RunningServer, running, wait_for
from tests.engine.server.test_faults import BODIES, until_ranks
from tests.engine.server.test_server_life import Stream, text_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def expected(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """From a model that runs whole."""
    with running(demo_model, tmp_path_factory.mktemp("whole")) as server, server.client() as client:
        return [text_of(client, **body) for body in BODIES]


def until_empty(server: RunningServer) -> None:
    with server.client() as client:
        wait_for(lambda: not server.metric("moeless:expert_memory_bytes", client), 120)


def test_experts_leave_and_come_back_whoever_is_a_rank(demo_model: Path, tmp_path: Path, expected: list[str]) -> None:
    args = ["--scale-to-zero", "--keep-alive", "2", "--ep", "2"]
    with running(demo_model, tmp_path, *args) as server, server.client() as client:
        until_empty(server)
        assert server.metric("moeless:expert_evictions_total", client, reason="keepalive") >= 12 * 16
        assert [text_of(client, **body) for body in BODIES] == expected
        assert server.metric("moeless:expert_starts_total", client, kind="cold") > 0
        assert server.metric("moeless:expert_memory_bytes", client) > 0

        until_empty(server)
        os.kill(server.rank_pids()[1], signal.SIGKILL)  # of an idle group
        wait_for(lambda: "died" in server.log, 60)
        streams = [Stream(client, **body) for body in BODIES]
        assert [stream.finish() for stream in streams] == expected
        until_ranks(client, 2)
        streams = [Stream(client, **body) for body in BODIES]
        for stream in streams:
            stream.began.wait(120)
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        assert [stream.finish() for stream in streams] == expected
        until_ranks(client, 2)

        until_empty(server)
        assert client.post("/scale", json={"ep": 1}).status_code == 200
        assert [text_of(client, **body) for body in BODIES] == expected
        until_empty(server)
        assert client.post("/scale", json={"ep": 2}).status_code == 200
        assert [text_of(client, **body) for body in BODIES] == expected
        until_empty(server)
        assert server.stop() == 0
