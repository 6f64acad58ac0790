"""Two network namespaces stand for two hosts: they share a service over a cable, and one is lost by pulling it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.engine.server.running import RunningServer, wait_for
from tests.engine.server.test_server_life import Stream, text_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
FRONT, OTHER = f"mlfront{os.getpid()}", f"mlother{os.getpid()}"
CABLE, CLIENT = "10.213.77", "10.213.78"
"""Networks between the two hosts, and between the front end and this test."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *" ".join(words).split()], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[None]:
    """The two namespaces, a cable between them, and one from the first to here."""
    tag = os.getpid()
    with ExitStack() as stack:
        try:
            for name in (FRONT, OTHER):
                ip(f"netns add {name}")
                stack.callback(ip, f"netns del {name}")  # the cables go with it
            ip(f"link add cable netns {FRONT} type veth peer name cable netns {OTHER}")
            ip(f"link add ml{tag} type veth peer name client netns {FRONT}")
            ip(f"addr add {CLIENT}.2/24 dev ml{tag}")
            ip(f"link set ml{tag} up")
            for name, number in ((FRONT, 1), (OTHER, 2)):
                ip(f"-n {name} addr add {CABLE}.{number}/24 dev cable")
                ip(f"-n {name} link set cable up")
                ip(f"-n {name} link set lo up")
            ip(f"-n {FRONT} addr add {CLIENT}.1/24 dev client")
            ip(f"-n {FRONT} link set client up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
            pytest.skip(f"network namespaces can't be made here: {reason}")
        yield


@contextmanager
def lending(log: IO[str], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`moeless join` on the other host."""
    command = ["ip", "netns", "exec", OTHER, sys.executable, "-m", "moeless", "join", f"{CABLE}.1:29401", *options]
    process = subprocess.Popen(command, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_host_that_is_cut_off_is_a_pause(
    hosts: None, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOELESS_RANK_KEY", "shared")
    body = {"prompt": "Once upon a time", "max_tokens": 120}
    options = ["--ep", "2", "--local-ranks", "1", "--rank-address", f"{CABLE}.1:29401", "--host", f"{CLIENT}.1"]
    limits = ["--step-timeout", "5", "--heartbeat-timeout", "4"]
    with (
        (tmp_path / "join.log").open("w") as log,
        RunningServer(demo_model, tmp_path, *options, *limits, inside=["ip", "netns", "exec", FRONT]) as server,
        lending(log, "--front-timeout", "15") as other,
    ):
        server.wait_ready()
        with server.client() as client:
            assert client.get("/health").json()["ranks"] == 2
            assert len(server.rank_pids()) == 1
            expected = text_of(client, **body)
            streams = [Stream(client, **body) for _ in range(2)]
            for stream in streams:
                stream.began.wait(120)
            ip(f"-n {OTHER} link set cable down")
            assert [stream.finish() for stream in streams] == [expected, expected]
            assert client.get("/health").json() == {"status": "ok", "ranks": 1}
            assert server.metric("moeless:rank_failures_total", client, reason="silence") == 1
            assert other.wait(60) == 1  # it has missed the front end
            assert "no front end answers" in (tmp_path / "join.log").read_text()
            ip(f"-n {OTHER} link set cable up")
            with lending(log) as again:
                wait_for(lambda: client.get("/health").json()["ranks"] == 2, 120)
                assert text_of(client, **body) == expected
                assert server.stop() == 0
                again.send_signal(signal.SIGTERM)
                assert again.wait(30) == 130
