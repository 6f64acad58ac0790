"""`moeless bench serve`: load on a server over HTTP; one that runs, or one started for each balancer in turn.

All balancers get the same requests at the same times. With greedy sampling, the share of equal texts is reported too: a
balancer changes where tokens are computed, never what comes out, but for near-ties that another batch shape can flip.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx

from moeless.bench.serve_experts import ExpertSampler, Scrape, describe_experts, scrape
from moeless.bench.serve_load import LoadOptions, LoadRun, api_headers, first_model, run_load
from moeless.bench.serve_numbers import details, same_text_share, summarise
from moeless.bench.serve_plots import draw_serve
from moeless.bench.serve_process import running_server
from moeless.bench.serve_requests import Load, make_load
from moeless.config.bench_serve import BenchServeConfig
from moeless.errors import RankError
from moeless.files import require_writable, write_json
from moeless.progress import progress_bar
from moeless.result import result_header

SCHEMA = "moeless.bench-serve/1"


def run_bench_serve(config: BenchServeConfig) -> dict[str, Any]:
    """Run the load, write `serve.json` and the picture; the result.

    Raises:
        DataError: requests or a folder that cannot be used.
        RankError: a server that does not start, or under which every request failed.
    """
    require_writable(config.out)
    header = result_header(SCHEMA, "live", config)
    # JSON has no infinity
    header["config"]["request_rate"] = "inf" if config.request_rate == math.inf else config.request_rate
    load: Load | None = None
    runs: list[LoadRun] = []
    rows: list[dict[str, Any]] = []
    for name in ("server",) if config.base_url is not None else config.balancer_names:
        with _server(config, name) as base_url:
            load, run, row = _measure(config, base_url, load)
        runs.append(run)
        same = same_text_share(run, runs[0]) if config.temperature == 0 and len(runs) > 1 else None
        rows.append({"name": name, **row, "same_text": same})
    assert load is not None
    result = {**header, "load": load.as_dict(), **(rows[0] if len(rows) == 1 else {}), "runs": rows}
    if config.save_detailed:
        result["requests"] = {row["name"]: details(run) for row, run in zip(rows, runs, strict=True)}
    write_json(config.out / "serve.json", result)
    if config.plots:
        draw_serve(result, config.out)
    if not any(row["completed"] for row in rows):
        raise RankError(f"every request failed: {next(iter(rows[0]['errors']))}; see {config.out / 'serve.json'}")
    return result


@contextlib.contextmanager
def _server(config: BenchServeConfig, name: str) -> Iterator[str]:
    if config.base_url is not None:
        yield config.base_url
        return
    assert config.model is not None, "the configuration has an address or a model"
    log_path = config.out / f"server-{name}.log"
    with running_server(config.model, config.server_flags(name), log_path, config.start_timeout_s) as base_url:
        yield base_url


def _measure(config: BenchServeConfig, base_url: str, load: Load | None) -> tuple[Load, LoadRun, dict[str, Any]]:
    """One run; `load` is made with the first server's tokenizer and kept for the others."""
    with httpx.Client(base_url=base_url, headers=api_headers(), timeout=60) as client:
        model = first_model(client)
        name = config.model if config.base_url is not None and config.model is not None else model["id"]
        load = load or make_load(config, client, name, model.get("max_model_len") or 2**31)
    options = LoadOptions(
        model=name,
        ignore_eos=config.ignore_eos or config.trace is not None or config.dataset_name == "random",
        temperature=config.temperature,
        max_concurrency=config.max_concurrency,
        timeout_s=config.request_timeout_s,
    )
    run, before, after, samples = asyncio.run(_drive(config, base_url, load, options))
    numbers = summarise(run, metrics=config.metric_names, percentiles=config.percentiles, goodput_ms=config.goodput_ms)
    return load, run, {"model_id": name, **numbers, "moe": describe_experts(before, after, samples)}


async def _drive(
    config: BenchServeConfig, base_url: str, load: Load, options: LoadOptions
) -> tuple[LoadRun, Scrape, Scrape, list[Scrape]]:
    """Warm up, then run the load between two scrapes."""
    if config.num_warmups:
        requests = [replace(load.requests[i % len(load.requests)], due_s=0.0) for i in range(config.num_warmups)]
        await run_load(base_url, requests, replace(options, max_concurrency=1), advance=lambda _: None)
    sampler = ExpertSampler()
    async with httpx.AsyncClient(base_url=base_url, headers=api_headers(), timeout=60) as client:
        before = await scrape(client)
        with progress_bar("requests", len(load.requests), "req") as advance:
            run = await run_load(base_url, load.requests, options, advance=advance, observe=sampler)
        after = await scrape(client)
    return run, before, after, sampler.scrapes
