"""More requests than a server can do, for minutes: is the queue bounded, are accepted ones answered, is memory flat?

    python benchmarks/overload.py [MODEL] [--minutes 15] [--factor 4] [--ep 1] [--json FILE]

First the capacity is measured, by clients that send one request after another; then `factor` times as many requests
arrive at random, whatever becomes of the earlier ones. What the queue does not take is answered 503 with Retry-After.
One row a minute; the exit code is 1 when a bound did not hold, something failed, or memory grew after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import resident
from abuse import Connection
from mutations import Attack, http
from prometheus_client.parser import text_string_to_metric_families

from moeless.bench.serve_process import running_server

ROOT = Path(__file__).parent.parent
MODEL = "demo"
_FLAT = 0.03
"""Growth from the end of the warm-up to the end of the run that still counts as flat, as a share."""
_LONGEST_S = 120.0
_POLL_S = 2.0


@dataclass
class Minute:
    """What happened to the requests that arrived in one minute, and what was seen meanwhile."""

    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    latencies_s: list[float] = field(default_factory=list)
    queued_max: int = 0
    resident_mb: dict[str, float] = field(default_factory=dict)

    def row(self, number: int) -> dict[str, Any]:
        """Plain numbers; latencies are those of accepted requests, in seconds."""
        return {
            "minute": number,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "failed": self.failed,
            "p50_s": percentile(self.latencies_s, 50),
            "p99_s": percentile(self.latencies_s, 99),
            "queued_max": self.queued_max,
            "resident_mb": self.resident_mb,
        }


def percentile(values: Sequence[float], share: int) -> float | None:
    """The nearest-rank percentile; None of nothing."""
    ordered = sorted(values)
    return round(ordered[max(0, -(-len(ordered) * share // 100) - 1)], 3) if ordered else None


class Load:
    """Requests of random sizes, the same for the same seed, and what came of them."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.failures: list[str] = []
        self._address, self._rng = (host, port), random.Random(seed)

    async def one(self, minute: Minute) -> None:
        """Send a request over a connection of its own, and count its end."""
        prompt = [self._rng.randrange(10, 4_000) for _ in range(self._rng.randint(4, 64))]
        tokens = self._rng.randint(4, 32)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        attack = Attack(kind="load", wire=http("/v1/completions", json.dumps(body).encode()), closes=True)
        connection, begin_s = Connection(*self._address), time.perf_counter()
        try:
            status, headers, answer = await asyncio.wait_for(connection.send(attack), _LONGEST_S)
            made = json.loads(answer).get("usage", {}).get("completion_tokens")
        except (TimeoutError, OSError, ValueError) as error:
            self._fail(minute, repr(error))
            return
        if status == 503 and "retry-after" in headers:
            minute.rejected += 1
        elif status == 200 and made == tokens:
            minute.accepted += 1
            minute.latencies_s.append(time.perf_counter() - begin_s)
        else:
            self._fail(minute, f"{status}: {answer[:200]!r}")

    def _fail(self, minute: Minute, reason: str) -> None:
        minute.failed += 1
        if len(self.failures) < 10:
            self.failures.append(reason)


async def measure_capacity(load: Load, seconds: float, streams: int) -> float:
    """Requests a second of `streams` clients that never wait."""
    counted, begin_s = Minute(), time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - begin_s < seconds:
            await load.one(counted)

    await asyncio.gather(*(client() for _ in range(streams)))
    return counted.accepted / (time.perf_counter() - begin_s)


async def overload(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Capacity, then the minutes of overload."""
    async with httpx.AsyncClient(base_url=url, timeout=_LONGEST_S) as client:
        load = Load(client.base_url.host, client.base_url.port or 80, args.seed)
        capacity = await measure_capacity(load, args.measure_s, args.max_seqs)
        offered = args.factor * capacity
        print(f"capacity {capacity:.1f} requests/s, offering {offered:.1f}", file=sys.stderr, flush=True)
        minutes = [Minute() for _ in range(max(1, round(args.minutes)))]
        watch = asyncio.create_task(_watch(client, minutes))
        await _offer(load, minutes, offered, args.seed)
        watch.cancel()
        alive = (await client.get("/health")).status_code == 200
    rows = [minute.row(number) for number, minute in enumerate(minutes, 1)]
    return {
        "capacity_per_s": round(capacity, 2),
        "offered_per_s": round(offered, 2),
        "minutes": rows,
        "failures": load.failures,
        "alive": alive,
    }


async def _offer(load: Load, minutes: list[Minute], per_s: float, seed: int) -> None:
    """Arrivals at random, independent of the answers, on a clock that catches up when this program is late."""
    rng, tasks = random.Random(seed + 1), set()
    begin_s = due_s = time.perf_counter()
    end_s = begin_s + 60 * len(minutes)
    while (due_s := due_s + rng.expovariate(per_s)) < end_s:
        if (early_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(early_s)
        task = asyncio.create_task(load.one(minutes[int((due_s - begin_s) // 60)]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def _watch(client: httpx.AsyncClient, minutes: list[Minute]) -> None:
    """What runs and waits, and memory, every few seconds; a minute keeps its longest queue and its last memory."""
    begin_s = time.perf_counter()
    while True:
        text = (await client.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        held = sum(
            s.value for s in samples if s.name in ("moeless:num_requests_running", "moeless:num_requests_waiting")
        )
        number = int((time.perf_counter() - begin_s) // 60)
        if number < len(minutes):
            minutes[number].queued_max = max(minutes[number].queued_max, int(held))
            minutes[number].resident_mb = resident.resident_mb()
        await asyncio.sleep(_POLL_S)


def judge(result: dict[str, Any], bound: int) -> dict[str, Any]:
    """Which promises held. Memory is flat when it did not grow by more than 3 % after the first third."""
    rows = result["minutes"]
    first, last = rows[len(rows) // 3]["resident_mb"], rows[-1]["resident_mb"]
    growth = {part: round(last[part] / first[part] - 1, 4) for part in last}
    p99s = [row["p99_s"] for row in rows if row["p99_s"] is not None]
    return {
        "queue_bound": bound,
        "queue_bound_held": all(row["queued_max"] <= bound for row in rows),
        "overloaded": sum(row["rejected"] for row in rows) > 0,
        "failed": sum(row["failed"] for row in rows),
        "p99_s_worst": max(p99s, default=None),
        "growth_after_warm_up": growth if len(rows) > 1 else None,
        "memory_flat": all(share <= _FLAT for share in growth.values()) if len(rows) > 1 else None,
    }


def print_result(result: dict[str, Any]) -> None:
    """A row a minute, and the verdict."""
    names = ("minute", "accepted", "rejected", "failed", "p50 s", "p99 s", "held", "front MB", "ranks MB")
    print("".join(f"{name:>10}" for name in names))
    for row in result["minutes"]:
        columns = [row[name] for name in ("minute", "accepted", "rejected", "failed", "p50_s", "p99_s", "queued_max")]
        columns += [row["resident_mb"].get(part) for part in ("front", "ranks")]
        print("".join(f"{'-' if value is None else value:>10}" for value in columns))
    for reason in result["failures"]:
        print(f"failed: {reason}")
    verdict = result["verdict"]
    flat = {None: "not judged in one minute", True: "yes", False: "NO"}[verdict["memory_flat"]]
    held = "held" if verdict["queue_bound_held"] else "NOT held"
    print(
        f"capacity {result['capacity_per_s']} requests/s, offered {result['offered_per_s']}; alive {result['alive']};"
    )
    print(f"bound of {verdict['queue_bound']} running and waiting {held}; worst p99 {verdict['p99_s_worst']} s;")
    print(f"memory flat after warm-up: {flat} {verdict['growth_after_warm_up'] or ''}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "demo-moe"))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--factor", type=float, default=4, help="times the measured capacity")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--max-seqs", type=int, default=16, help="sequences a rank runs at once")
    parser.add_argument("--max-queued", type=int, default=32, help="further completions that may wait")
    parser.add_argument("--measure-s", type=float, default=15, help="seconds to measure the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    flags = ["--served-model-name", MODEL, "--ep", str(args.ep), "--max-num-seqs", str(args.max_seqs)]
    flags += ["--max-num-queued-reqs", str(args.max_queued)]
    with tempfile.TemporaryDirectory() as folder, running_server(args.model, flags, Path(folder) / "log", 300) as url:
        result = asyncio.run(overload(url, args))
    result["verdict"] = judge(result, args.ep * args.max_seqs + args.max_queued)
    options = {name: getattr(args, name) for name in ("minutes", "factor", "ep", "max_seqs", "max_queued", "seed")}
    result = {"schema": "moeless.overload/1", "source": "live", "options": options, **result}
    print_result(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    verdict = result["verdict"]
    sound = result["alive"] and verdict["queue_bound_held"] and not verdict["failed"] and verdict["overloaded"]
    return int(not sound or verdict["memory_flat"] is False)


if __name__ == "__main__":
    sys.exit(main())
