"""A `moeless serve` process of this benchmark's own: started, waited for, and ended whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moeless.errors import DataError, RankError

_END_S = 60.0
_POLL_S = 0.2


@contextmanager
def running_server(model: str, flags: Sequence[str], log_path: Path, start_timeout_s: float) -> Iterator[str]:
    """Start a server on a free port and give its address; what it says goes to `log_path`.

    Raises:
        RankError: it ended, or was not ready in time, or does not end with exit code 0 after SIGTERM; with its last
            words.
        DataError: the log cannot be written.
    """
    command = [sys.executable, "-m", "moeless", "serve", model, *flags, "--port", "0", "--json"]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("wb")
    except OSError as error:
        raise DataError(f"cannot write {str(log_path)!r}: {error.strerror}") from error
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True) as process:
        try:
            with _ending_on_sigterm():
                yield _wait_ready(process, log_path, start_timeout_s)
        finally:
            _end(process)
    if process.returncode:
        raise RankError(f"the server ended with {process.returncode}: {_last_words(log_path)}; see {log_path}")


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack, as Ctrl-C does, so that the server is not left behind. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_ready(process: subprocess.Popen[bytes], log_path: Path, timeout_s: float) -> str:
    assert process.stdout is not None
    deadline, said = time.monotonic() + timeout_s, b""
    while not said.endswith(b"\n"):
        if time.monotonic() > deadline:
            raise RankError(f"the server was not ready within {timeout_s:g} s; see {log_path}")
        if select.select([process.stdout], [], [], _POLL_S)[0]:
            part = os.read(process.stdout.fileno(), 4_096)
            if not part:
                raise RankError(f"the server ended: {_last_words(log_path)}; see {log_path}")
            said += part
    url: str = json.loads(said)["url"]
    return url


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL when that does not help; its ranks end with it either way."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("moeless: ") if lines else "without a word"
