"""What an idle service costs and what it costs to wake it: memory, processor time, and time to the first token.

    python benchmarks/idle.py [MODEL] [--ep 1 2] [--keep-alive 5] [--cycles 3] [--json FILE]

A server with --scale-to-zero gets some requests and then none, until its metrics say that no expert is left in memory;
after a while of quiet, in which the ranks' processor time is counted, the same request comes again. `anon` is the part
of the resident set that is not mapped files. The exit code is 1 when an output differs, an expert stays, or a rank uses
2 % of a core or more while nothing is there to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import resident
from prometheus_client.parser import text_string_to_metric_families

from moeless.bench.serve_process import running_server

ROOT = Path(__file__).parent.parent
_LONGEST_S = 300.0
_POLL_S = 0.1
_MOST_IDLE = 0.02
"""Of a core, for each rank."""


def request(client: httpx.Client, body: dict[str, Any]) -> tuple[float, str]:
    """Seconds to the first token of a stream, and its text."""
    begin_s, first_s, text = time.perf_counter(), None, []
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                first_s = first_s or time.perf_counter() - begin_s
                text += [choice["text"] for choice in event["choices"]]
    if first_s is None:
        raise SystemExit("a stream ended without a token")
    return first_s, "".join(text)


def metrics(client: httpx.Client) -> dict[str, float]:
    """Expert bytes in all ranks' memory, and what was started and dropped since the start."""
    samples = [s for f in text_string_to_metric_families(client.get("/metrics").text) for s in f.samples]

    def total(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    return {
        "expert_mb": total("moeless:expert_memory_bytes") / 1e6,
        "cold": total("moeless:expert_starts_total", kind="cold"),
        "dropped": total("moeless:expert_evictions_total", reason="keepalive"),
        "resident_gb_s": total("moeless:cost_gb_seconds_total", component="resident"),
    }


def look(client: httpx.Client) -> dict[str, float]:
    """Memory of all ranks together, and the metrics."""
    rss = {"rss_mb": resident.resident_mb()["ranks"], "anon_mb": resident.resident_mb("RssAnon")["ranks"]}
    return {**rss, **metrics(client)}


def until_empty(client: httpx.Client) -> float:
    """Wait until no expert is in memory; how long that took."""
    begin_s = time.perf_counter()
    while metrics(client)["expert_mb"]:
        if time.perf_counter() - begin_s > _LONGEST_S:
            raise SystemExit(f"experts are still in memory after {_LONGEST_S:g} s without a request")
        time.sleep(_POLL_S)
    return time.perf_counter() - begin_s


def idle_shares(seconds: float) -> list[float]:
    """Each rank's share of a core while this process does nothing for so long."""
    begin_s, before = time.perf_counter(), resident.cpu_s()
    time.sleep(seconds)
    passed_s = time.perf_counter() - begin_s
    return [round((after - start) / passed_s, 5) for after, start in zip(resident.cpu_s(), before, strict=True)]


def cycle(client: httpx.Client, body: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Warm requests, nothing until the service is empty, quiet, the request that wakes it."""
    warm = [request(client, body) for _ in range(args.repeats)]
    full = look(client)
    empty_after_s = until_empty(client)
    empty = look(client)
    shares = idle_shares(args.quiet)
    first = request(client, body)
    woken = look(client)
    return {
        "full": full,
        "empty": empty,
        "woken": woken,
        "empty_after_s": empty_after_s,
        "idle_cpu": shares,
        "warm_ttft_s": [ttft_s for ttft_s, _ in warm],
        "first_ttft_s": first[0],
        "cold_starts": woken["cold"] - empty["cold"],
        "texts": [text for _, text in [*warm, first]],
    }


def measure(ep: int, args: argparse.Namespace) -> dict[str, Any]:
    """One server of `ep` ranks through all cycles."""
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    rng = random.Random(args.seed)
    prompt = [rng.randrange(10, vocab_size) for _ in range(args.prompt_tokens)]
    body = {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
    flags = ["--ep", str(ep), "--scale-to-zero", "--keep-alive", str(args.keep_alive)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(args.model, flags, Path(folder) / "log", 300) as url,
        httpx.Client(base_url=url, timeout=_LONGEST_S) as client,
    ):
        loaded = look(client)
        request(client, body)
        cycles = [cycle(client, body, args) for _ in range(args.cycles)]
    texts = {text for each in cycles for text in each.pop("texts")}
    return {"ep": ep, "loaded": loaded, "cycles": cycles, "num_texts": len(texts)}


def judge(result: dict[str, Any]) -> dict[str, bool]:
    """Which promises one server kept."""
    return {
        "same_tokens": result["num_texts"] == 1,
        "empty": all(each["empty"]["expert_mb"] == 0 for each in result["cycles"]),
        "quiet": all(share < _MOST_IDLE for each in result["cycles"] for share in each["idle_cpu"]),
    }


def print_result(result: dict[str, Any]) -> None:
    """A row a state, times as medians over the cycles."""
    cycles = result["cycles"]
    print(f"--ep {result['ep']}: all ranks together, MB")
    print(f"  {'':<22}{'experts':>10}{'anon':>10}{'rss':>10}")
    rows = [("when ready", result["loaded"])]
    for number, each in enumerate(cycles, 1):
        rows += [(f"{number}. after requests", each["full"]), (f"{number}. without", each["empty"])]
        rows += [(f"{number}. first request", each["woken"])]
    for name, row in rows:
        print(f"  {name:<22}{row['expert_mb']:>10.1f}{row['anon_mb']:>10.1f}{row['rss_mb']:>10.1f}")
    warm = statistics.median(ttft_s for each in cycles for ttft_s in each["warm_ttft_s"])
    first = [each["first_ttft_s"] for each in cycles]
    share = max(share for each in cycles for share in each["idle_cpu"])
    print(f"  time to first token: warm {1e3 * warm:.1f} ms, from zero {1e3 * statistics.median(first):.1f} ms", end="")
    print(f" with {cycles[-1]['cold_starts']:.0f} cold starts")
    print(f"  empty {max(each['empty_after_s'] for each in cycles):.1f} s after the last request at most; ", end="")
    print(f"then at most {100 * share:.2f} % of a core a rank")
    print("  " + ", ".join(f"{name} {'yes' if held else 'NO'}" for name, held in judge(result).items()))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "demo-moe"))
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--keep-alive", type=float, default=5.0, help="the server's, in seconds")
    parser.add_argument("--cycles", type=int, default=3, help="times the service is left to empty itself")
    parser.add_argument("--repeats", type=int, default=5, help="warm requests of a cycle")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds of which processor time is counted")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    results = [measure(ep, args) for ep in args.ep]
    for result in results:
        print_result(result)
    if args.json:
        host = {"platform": platform.platform(), "num_cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
        options = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"schema": "moeless.idle/1", "source": "live", "host": host, "options": options, "servers": results}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(not all(held for result in results for held in judge(result).values()))


if __name__ == "__main__":
    sys.exit(main())
