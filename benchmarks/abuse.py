"""Hostile clients against a real server: 0 five-hundreds, 0 crashes, right tokens for everyone else, bounded memory.

    python benchmarks/abuse.py [MODEL] [--requests 10000] [--connections 32] [--seed 0] [--json FILE]

Starts `moeless serve` on the bundled model (or takes one at --url, served as "demo"), sends it valid requests that were
changed at random (benchmarks/mutations.py) over many connections at once, with slow clients holding others open all the
while, and checks the greedy answers in between. A 503 with Retry-After, of a full queue, is no failure. The exit code
is 1 when anything failed; the seed gives the same requests again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mutations
import resident
from mutations import Attack, make_attack

from moeless.bench.serve_process import running_server

ROOT = Path(__file__).parent.parent
_LONGEST_S = 30.0
"""A client that has no answer by then goes away; it is counted, and no failure: some ask for thousands of tokens."""
_DROP_S = 0.01
_EXAMPLES = 20


class Connection:
    """One client's connection, opened again when it was closed."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, attack: Attack) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; status 0 when the client left, or the server closed first."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=2**24)
        keep = False
        try:
            with suppress(ConnectionError):  # closed by the server before all was sent; there may be an answer
                self._writer.write(attack.wire)
                await self._writer.drain()
                for part in attack.parts:
                    await asyncio.sleep(_DROP_S)
                    self._writer.write(part)
                    await self._writer.drain()
            if attack.leaves_after is not None:
                if attack.leaves_after:
                    await self._reader.read(attack.leaves_after)
                return 0, {}, b""
            status, headers, body = await _read_answer(self._reader)
            keep = not attack.closes and headers.get("connection") != "close"
            return status, headers, body
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0, {}, b""
        finally:
            if not keep:
                await self.close()

    async def close(self) -> None:
        """Go away."""
        if self._writer is not None:
            await _hang_up(self._writer)
        self._reader = self._writer = None


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    status = int(head[0].split()[1])
    if headers.get("transfer-encoding") != "chunked":
        return status, headers, await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return status, headers, body


class Tally:
    """What came of the requests."""

    def __init__(self, expected: str) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, Any]] = []
        self.num_failed = 0
        self._expected = expected

    def count(self, number: int, attack: Attack, status: int, headers: dict[str, str], body: bytes) -> None:
        """Take an answer in and judge it."""
        name = {0: "left or closed", -1: "no answer in time"}.get(status, str(status))
        self.statuses.setdefault(attack.kind, Counter())[name] += 1
        if reason := self._fault(attack, status, headers, body):
            self.num_failed += 1
            if len(self.failures) < _EXAMPLES:
                sent, got = attack.wire[:400].decode("latin-1"), body[:300].decode("utf-8", "replace")
                self.failures.append({"number": number, "reason": reason, "sent": sent, "got": got})

    def _fault(self, attack: Attack, status: int, headers: dict[str, str], body: bytes) -> str:
        if status == 503:
            return "" if "retry-after" in headers else "503 without Retry-After"
        if status >= 500:
            return f"status {status}"
        if attack.is_valid and (status != 200 or text_of(body) != self._expected):
            return f"a valid request got {status} and {'another' if status == 200 else 'no'} answer"
        if status >= 400 and attack.kind != "protocol" and not _is_error(body):
            return f"{status} without OpenAI's error"
        if b'"error"' in body and b'"server_error"' in body:
            return "a stream ended with an internal error"
        return ""


def text_of(body: bytes) -> str | None:
    """The completion's text."""
    try:
        text: str = json.loads(body)["choices"][0]["text"]
    except (ValueError, LookupError, TypeError):
        return None
    return text


def _is_error(body: bytes) -> bool:
    try:
        return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    except (ValueError, LookupError, TypeError):
        return False


async def attack_all(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send everything; the figures."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    first = mutations.valid(random.Random(0), "valid")
    _, _, body = await _send_alone(host, port, first)
    expected = text_of(body)
    if expected is None:
        raise SystemExit(f"the server does not answer a valid request: {body[:300]!r}")
    tally = Tally(expected)
    before = None if args.url else resident.resident_mb()
    numbers = iter(range(args.requests))
    begin_s = time.perf_counter()
    idlers = [asyncio.create_task(_dawdle(host, port)) for _ in range(args.slow)]
    await asyncio.gather(*(_client(host, port, numbers, args.seed, tally) for _ in range(args.connections)))
    seconds = time.perf_counter() - begin_s
    for idler in idlers:
        idler.cancel()
    await asyncio.gather(*idlers, return_exceptions=True)
    after = None if args.url else resident.resident_mb()
    alive, _, body = await _send_alone(host, port, first)
    health, _, _ = await _send_alone(host, port, Attack(kind="health", wire=b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
    totals: Counter[str] = sum(tally.statuses.values(), Counter())
    return {
        "requests": args.requests,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(totals.items())),
        "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in sorted(tally.statuses.items())},
        "failed": tally.num_failed,
        "failures": tally.failures,
        "alive": health == 200,
        "right_at_the_end": alive == 200 and text_of(body) == expected,
        "resident_mb": {"before": before, "after": after},
    }


async def _send_alone(host: str, port: int, attack: Attack) -> tuple[int, dict[str, str], bytes]:
    connection = Connection(host, port)
    try:
        return await asyncio.wait_for(connection.send(attack), _LONGEST_S)
    finally:
        await connection.close()


async def _client(host: str, port: int, numbers: Any, seed: int, tally: Tally) -> None:
    connection = Connection(host, port)
    for number in numbers:
        attack = make_attack(random.Random(f"{seed}.{number}"))
        try:
            answer = await asyncio.wait_for(connection.send(attack), _LONGEST_S)
        except TimeoutError:
            answer = -1, {}, b""
        except (OSError, ValueError) as error:
            await connection.close()
            answer = 0, {}, repr(error).encode()
        tally.count(number, attack, *answer)
        if number % 1_000 == 999:
            print(f"{number + 1} sent, {tally.num_failed} failed", file=sys.stderr, flush=True)
    await connection.close()


async def _dawdle(host: str, port: int) -> None:
    """Hold a connection with a request that never becomes whole, a byte a second; open it again when it is closed."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n"
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            try:
                for byte in head + b"\r\n" + b" " * 90_000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(1 if byte == 32 else 0.05)
            finally:
                await _hang_up(writer)
        await asyncio.sleep(0.1)


def print_result(result: dict[str, Any]) -> None:
    """A table by kind of attack, and the verdict."""
    names = list(result["statuses"])
    print("".join([f"{'kind':<10}", *(f"{name:>19}" for name in names)]))
    for kind, counts in result["by_kind"].items():
        print("".join([f"{kind:<10}", *(f"{counts.get(name, 0):>19}" for name in names)]))
    for failure in result["failures"]:
        print(f"number {failure['number']}: {failure['reason']}\n  sent {failure['sent']!r}\n  got {failure['got']!r}")
    print(
        f"{result['requests']} requests in {result['seconds']} s; failed {result['failed']}; alive {result['alive']};"
    )
    print(f"right tokens at the end {result['right_at_the_end']}; tracebacks in the log {result['tracebacks']};")
    print(f"resident MB {result['resident_mb']}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "demo-moe"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--slow", type=int, default=16, help="further connections that send a byte a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--url", help="a running server, instead of one of this program's own")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    flags = ["--served-model-name", mutations.MODEL, "--ep", str(args.ep), "--body-timeout", "5"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = args.url or stack.enter_context(running_server(args.model, flags, folder / "server.log", 300))
        result = asyncio.run(attack_all(url, args))
        log = "" if args.url else (folder / "server.log").read_text()
    result = {"schema": "moeless.abuse/1", "source": "live", "seed": args.seed, "ep": args.ep, **result}
    result["tracebacks"] = log.count("Traceback (most recent call last)")
    if result["tracebacks"]:
        print(log[-4_000:], file=sys.stderr)
    print_result(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["failed"] or result["tracebacks"] or not (result["alive"] and result["right_at_the_end"])))


if __name__ == "__main__":
    sys.exit(main())
