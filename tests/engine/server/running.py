"""A real `moeless serve` process and what tests ask of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_S = 180.0
MODEL = "demo"


class RunningServer:
    """A server process on a port of its own choice; stderr is kept for assertions."""

    def __init__(self, model: Path, folder: Path, *args: str, inside: Sequence[str] = ()) -> None:
        """Start it, `inside` what a command may be run in."""
        self.log_path = folder / "server.log"
        command = [*inside, sys.executable, "-m", "moeless", "serve", str(model), "--port", "0", "--json"]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--served-model-name", MODEL, *args],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env={**os.environ, "TQDM_DISABLE": "1"},
            )
        self.url = ""

    def wait_listening(self) -> str:
        """The address, which is printed before the model is loaded."""
        self.url = wait_for(lambda: _between(self.log, "listening at ", ","), START_S)
        return self.url

    def wait_ready(self) -> None:
        """The JSON line on stdout."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"not ready in {START_S} s:\n{self.log}"
        self.url = json.loads(line)["url"]

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def rank_pids(self) -> list[int]:
        """The rank processes, oldest first."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found if b"moeless.engine.rank" in _command(int(pid))]

    def metric(self, name: str, client: httpx.Client | None = None, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        if client is None:
            with self.client() as client:
                return self.metric(name, client, **labels)
        text = client.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def stop(self, number: int = signal.SIGTERM, limit_s: float = 60.0) -> int:
        """Signal it; its exit code. Its ranks are gone too."""
        ranks = self.rank_pids() if self.process.poll() is None else []
        self.process.send_signal(number)
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {limit_s} s:\n{self.log}") from None
        wait_for(lambda: not [pid for pid in ranks if _command(pid)], 20)
        return code

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill it, if it has not ended, and wait until its ranks are gone."""
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def running(model: Path, folder: Path, *args: str) -> Iterator[RunningServer]:
    """A server that is ready."""
    with RunningServer(model, folder, *args) as server:
        server.wait_ready()
        yield server


def wait_for(condition: Callable[[], Any], limit_s: float) -> Any:
    """Ask until the answer is true; the answer."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not true within {limit_s} s"
        time.sleep(0.05)
    return answer


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream; it has to end with `[DONE]`."""
    last = ""
    for line in response.iter_lines():
        if line.startswith("data: "):
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]", f"the stream ended with {last!r}"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]
