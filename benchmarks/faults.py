"""Ranks are killed and stopped while `moeless serve` is under load: what its clients notice.

    python benchmarks/faults.py [MODEL] [--ep 3] [--streams 16] [--kills 20] [--hangs 5] [--seed 0] [--json FILE]

Greedy streams run over HTTP against a real server, first undisturbed, then again and again while processes of random
ranks (rank 0 too) get SIGKILL or SIGSTOP, each when the group is complete again. Every completion is compared with the
undisturbed one. A fault's recovery is the time until the last of the streams has gone on, as the clients see it. The
exit code is 1 if a request failed, an output differs, or a process is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
POLL_S = 0.02
SETTLE_S = 1.0
"""Tokens that a lost rank had sent may still reach clients for so long."""
RETURN_S = 120.0


@dataclass
class Fault:
    """One process of a rank that was killed or stopped; times in seconds."""

    kind: str
    rank: int
    at_s: float
    detection_s: float
    """Until a stopped process was killed by the front end; 0 for one that was killed here."""
    recovery_s: float = 0.0
    complete_s: float = 0.0
    """Until the group had all its ranks again."""


@dataclass
class Load:
    """What the streams have seen."""

    times: list[list[float]]
    """Of every token, a list a stream."""
    num_requests: int = 0
    failed: list[str] = field(default_factory=list)
    num_different: int = 0


class Server:
    """A `moeless serve` process."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = ["--ep", str(args.ep), "--heartbeat-timeout", str(args.heartbeat_timeout)]
        command = [sys.executable, "-m", "moeless", "serve", args.model, "--port", "0", "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start; see its output above")
        self.url: str = json.loads(line)["url"]
        self.seen: set[int] = set()

    def ranks(self) -> list[int]:
        """Process ids in order of rank, while the group is complete: survivors come before those that joined later."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if "moeless.engine.rank" in command_of(int(pid))]
        self.seen.update(found)
        return found

    def close(self) -> int:
        """End it; how many rank processes are left after 5 seconds."""
        self.ranks()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 5
        while (left := [pid for pid in self.seen if "moeless" in command_of(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return len(left)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def complete(client: httpx.AsyncClient, prompt: list[int], num_tokens: int, times: list[float]) -> str:
    """A stream's text. Raises `RuntimeError` or `httpx.HTTPError` when it did not end as it should."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, reason, last = [], None, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            times.append(time.monotonic())
            last = line.removeprefix("data: ")
            event = {} if last == "[DONE]" else json.loads(last)
            if "error" in event:
                raise RuntimeError(f"error event: {event['error']}")
            for choice in event.get("choices", ()):
                text.append(choice["text"])
                reason = choice["finish_reason"] or reason
    if last != "[DONE]" or reason != "length":
        raise RuntimeError(f"ended with {last[:200]!r}, finish_reason {reason}")
    return "".join(text)


async def stream(
    client: httpx.AsyncClient, load: Load, number: int, prompt: list[int], expected: str, args: argparse.Namespace
) -> None:
    """Run a prompt again and again until cancelled."""
    while True:
        load.num_requests += 1
        try:
            text = await complete(client, prompt, args.tokens, load.times[number])
            load.num_different += text != expected
        except (RuntimeError, httpx.HTTPError) as error:
            load.failed.append(f"stream {number}: {error!r}")
            await asyncio.sleep(0.1)


async def disturb(client: httpx.AsyncClient, server: Server, args: argparse.Namespace) -> list[Fault]:
    """All faults, one after the other, in an order of chance."""
    rng = random.Random(args.seed)
    kinds = ["kill"] * args.kills + ["hang"] * args.hangs
    rng.shuffle(kinds)
    faults: list[Fault] = []
    await until_complete(client, args.ep)
    for number, kind in enumerate(kinds):
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        rank = rng.randrange(args.ep)
        pids = server.ranks()
        assert len(pids) == args.ep, "the group is complete"
        at_s = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        while kind == "hang" and command_of(pids[rank]):
            await asyncio.sleep(POLL_S)
        detection_s = time.monotonic() - at_s if kind == "hang" else 0.0
        await asyncio.sleep(SETTLE_S)
        await until_complete(client, args.ep)
        faults.append(Fault(kind, rank, at_s, detection_s, complete_s=time.monotonic() - at_s))
        print(f"fault {number + 1} of {len(kinds)}: {kind} rank {rank}", file=sys.stderr, flush=True)
    await asyncio.sleep(2 * SETTLE_S)
    return faults


async def until_complete(client: httpx.AsyncClient, num_ranks: int) -> None:
    """Wait until so many ranks work."""
    deadline = time.monotonic() + RETURN_S
    while (await client.get("/health")).json().get("ranks") != num_ranks:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {num_ranks} ranks after {RETURN_S:g} s")
        await asyncio.sleep(POLL_S)


def recovery_s(fault: Fault, times: list[list[float]]) -> float:
    """From the fault until the last stream has gone on: the end of each one's longest silence around it."""
    until_s = fault.at_s + fault.detection_s + SETTLE_S
    ends = []
    for tokens in times:
        around = [(b - a, b) for a, b in pairwise(tokens) if a < until_s and b > fault.at_s]
        ends.append(max(around)[1] - fault.at_s if around else float("inf"))
    return max(ends)


async def measure(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """The undisturbed run, and the disturbed one."""
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(10, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.streams)]
    limits = httpx.Limits(max_connections=2 * args.streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=RETURN_S, limits=limits) as client:
        begin_s = time.monotonic()
        expected = await asyncio.gather(*(complete(client, prompt, args.tokens, []) for prompt in prompts))
        undisturbed_s = time.monotonic() - begin_s
        load = Load([[] for _ in prompts])
        streams = [
            asyncio.create_task(stream(client, load, i, prompt, expected[i], args)) for i, prompt in enumerate(prompts)
        ]
        begin_s = time.monotonic()
        try:
            faults = await disturb(client, server, args)
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        disturbed_s = time.monotonic() - begin_s
        metrics = (await client.get("/metrics")).text
    for fault in faults:
        fault.recovery_s = recovery_s(fault, load.times)
        fault.at_s -= begin_s
    names = ("moeless:rank_failures_total", "moeless:recovery_seconds_count", "moeless:recovery_seconds_sum")
    return {
        "undisturbed_s": undisturbed_s,
        "disturbed_s": disturbed_s,
        "requests": load.num_requests - args.streams,  # the last of each stream was cut off here
        "failed": load.failed,
        "different": load.num_different,
        "faults": [asdict(fault) for fault in faults],
        "metrics": [line for line in metrics.splitlines() if line.startswith(names)],
    }


def summary(result: dict[str, Any], args: argparse.Namespace) -> str:
    """What to print."""
    lines = [
        f"{args.ep} ranks, {args.streams} streams of {args.tokens} tokens, faults for {result['disturbed_s']:.0f} s",
        "requests {}, failed {}, with other tokens {}, processes left behind {}".format(
            result["requests"], len(result["failed"]), result["different"], result["left_behind"]
        ),
    ]
    for kind in ("kill", "hang"):
        chosen = [fault for fault in result["faults"] if fault["kind"] == kind]
        if chosen:
            ranks = sorted({fault["rank"] for fault in chosen})
            lines.append(f"{kind}s: {len(chosen)} of ranks {', '.join(map(str, ranks))}")
            lines += [f"  {name:<34}{_spread(chosen, key)}" for name, key in _FIGURES[kind]]
    lines.append(f"--heartbeat-timeout was {args.heartbeat_timeout:g} s")
    return "\n".join(lines + result["failed"][:10])


_FIGURES = {
    "kill": [("all streams went on after", "recovery_s"), ("group complete again after", "complete_s")],
    "hang": [
        ("noticed after", "detection_s"),
        ("all streams went on after", "recovery_s"),
        ("group complete again after", "complete_s"),
    ],
}


def _spread(faults: list[dict[str, Any]], key: str) -> str:
    values = [fault[key] for fault in faults]
    return f"median {statistics.median(values):6.2f} s   max {max(values):6.2f} s"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "demo-moe"))
    parser.add_argument("--ep", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each completion")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--heartbeat-timeout", type=float, default=4.0, help="the server's, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    server = Server(args)
    try:
        result = asyncio.run(measure(args, server))
    finally:
        left_behind = server.close()
    host = {"platform": platform.platform(), "num_cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    options = {name: value for name, value in vars(args).items() if name != "json"}
    result |= {"left_behind": left_behind, "host": host, "options": options}
    result = {"schema": "moeless.faults/1", "source": "live", **result}
    print(summary(result, args))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(bool(result["failed"] or result["different"] or left_behind))


if __name__ == "__main__":
    main()
