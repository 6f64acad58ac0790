"""Ranks that another host lends: two processes on this machine stand for two hosts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeless.config.join import JoinConfig
from moeless.config.serve import ServeConfig
from moeless.engine.hosts import HostList, Offer, Refused
from moeless.errors import UsageError
from tests.engine.server.running import RunningServer, wait_for
from tests.engine.server.test_server_life import Stream, text_of


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def joined(address: str, folder: Path, key: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "moeless", "join", address]
    with (folder / "join.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "MOELESS_RANK_KEY": key})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
def test_a_rank_of_another_host_serves_and_is_replaced(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MOELESS_RANK_KEY", "shared")
    body = {"prompt": "Once upon a time", "max_tokens": 60}
    arguments = ["--ep", "2", "--local-ranks", "1", "--rank-address", address]
    with RunningServer(demo_model, tmp_path, *arguments) as server:
        with joined(address, tmp_path, "wrong") as stranger:
            assert stranger.wait(120) == 1
        assert "moeless: the front end" in (tmp_path / "join.log").read_text()
        with joined(address, tmp_path, "shared") as host:
            server.wait_ready()
            assert len(server.rank_pids()) == 1
            with server.client() as client:
                expected = text_of(client, **body)
                streams = [Stream(client, **body) for _ in range(2)]  # one on each rank
                for stream in streams:
                    stream.began.wait(120)
                os.kill(host.pid, signal.SIGKILL)
                with joined(address, tmp_path, "shared") as second:
                    assert [stream.finish() for stream in streams] == [expected, expected]
                    wait_for(lambda: client.get("/health").json() == {"status": "ok", "ranks": 2}, 60)
                    assert server.stop() == 0
                    second.send_signal(signal.SIGTERM)
                    assert second.wait(30) == 130


def test_offers_need_the_key() -> None:
    hosts = HostList(f"127.0.0.1:{free_port()}", "right")
    sent: list[object] = []
    hosts._send = lambda name, message: sent.append(message)  # type: ignore[method-assign]
    hosts._take(b"a", Offer("wrong", 4))
    assert isinstance(sent[-1], Refused)
    assert hosts.num_free() == 0
    hosts._take(b"a", Offer("right", 4))
    assert hosts.num_free() == 4
    hosts.close()


@pytest.mark.parametrize(
    "options",
    [
        {"rank_address": "10.0.0.1:1234"},
        {"local_ranks": 1},
        {"rank_address": "10.0.0.1", "local_ranks": 1},
        {"rank_address": "127.0.0.1:80", "local_ranks": 2},
        {"rank_address": "10.0.0.1:80", "local_ranks": 1},  # no key
    ],
)
def test_flags_that_do_not_fit(options: dict[str, str | int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOELESS_RANK_KEY", raising=False)
    with pytest.raises(UsageError):
        ServeConfig(model="x", ep=2, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        JoinConfig(address="nowhere")
