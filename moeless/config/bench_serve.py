"""Configuration of `moeless bench serve`; flags that vLLM's command has too carry its names."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from moeless.config.engine import ServedBalancer
from moeless.config.options import Config, option, parse_names
from moeless.errors import MoelessError, UsageError

METRICS = ("ttft", "tpot", "itl", "e2el")
_PREDICTING = ("moeless", "moeless-roofline")


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig(Config):
    """Load on a server over HTTP, and what its clients and its experts saw."""

    base_url: str | None = option(
        "Address of a server that runs, such as http://127.0.0.1:8000.", default=None, group="Server"
    )
    model: str | None = option(
        "Checkpoint to start a server for; with --base-url, the name that requests use (default: the first of "
        "/v1/models).",
        default=None,
        group="Server",
    )
    ep: int | None = option("Ranks of the server to start (default: 2).", default=None, minimum=1, group="Server")
    balancer: str | None = option(
        f"One or more, comma-separated, out of {', '.join(get_args(ServedBalancer))}: a server is started for each in "
        "turn and gets the same requests (default: moeless-roofline).",
        default=None,
        group="Server",
    )
    predictors: str | None = option(
        "Folder made by `moeless finetune`, for the balancers that predict.", default=None, group="Server"
    )
    server_args: str | None = option(
        "Further flags of the server to start, in one string, such as '--expert-slots 20'.",
        default=None,
        group="Server",
    )
    start_timeout_s: float = option(
        "Seconds to wait until the server is ready.", default=600.0, minimum=0.1, group="Server"
    )

    backend: Literal["openai", "openai-chat"] = option(
        "openai: prompts go to /v1/completions as token ids; openai-chat: to /v1/chat/completions as one user message.",
        default="openai",
        group="Requests",
    )
    num_prompts: int | None = option(
        "Requests (default: 1,000, or all of the trace).", default=None, minimum=1, group="Requests"
    )
    dataset_name: Literal["custom", "sharegpt", "random"] = option(
        "custom and sharegpt: text of --dataset-path; random: tokens drawn from a text's, of the lengths given.",
        default="custom",
        group="Requests",
    )
    dataset_path: str | None = option(
        "ShareGPT JSON, JSONL with text, prompt, messages or token_ids, plain text, or a folder of these "
        "(default: the documentation that comes with Python).",
        default=None,
        group="Requests",
    )
    output_len: int | None = option(
        "Tokens to ask for (default: as many as the conversation's own answer has, else 128).",
        default=None,
        minimum=1,
        group="Requests",
    )
    random_input_len: int | None = option(
        "Prompt tokens with random (default: 1,024).", default=None, minimum=1, group="Requests"
    )
    random_output_len: int | None = option(
        "Tokens to ask for with random (default: 128).", default=None, minimum=1, group="Requests"
    )
    ignore_eos: bool = option(
        "Go on to the full length; always so with --trace and random.", default=False, group="Requests"
    )
    temperature: float = option("Sampling temperature; 0 is greedy.", default=0.0, minimum=0.0, group="Requests")
    seed: int = option("Seed of prompts and arrivals.", default=0, minimum=0, group="Requests")

    request_rate: float = option("Requests a second; inf sends all at once.", default=math.inf, group="Arrivals")
    burstiness: float | None = option(
        "Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts (default: 1).",
        default=None,
        minimum=0.01,
        group="Arrivals",
    )
    max_concurrency: int | None = option("Requests in flight at most.", default=None, minimum=1, group="Arrivals")
    trace: Path | None = option(
        "Times and lengths of requests, Azure's .csv or Mooncake's .jsonl; prompts are text cut or repeated to length.",
        default=None,
        group="Arrivals",
    )
    time_scale: float | None = option(
        "Factor on the trace's times: 0.1 replays it ten times as fast (default: 1).",
        default=None,
        minimum=1e-6,
        group="Arrivals",
    )
    length_scale: float | None = option(
        "Factor on the trace's prompt and output lengths, for a machine smaller than the trace's (default: 1).",
        default=None,
        minimum=1e-6,
        group="Arrivals",
    )
    max_duration_s: float | None = option(
        "Only the trace's first so many seconds, in its own time.", default=None, minimum=0.0, group="Arrivals"
    )
    num_warmups: int = option(
        "Requests sent before, one by one, that do not count.", default=0, minimum=0, group="Arrivals"
    )
    request_timeout_s: float = option(
        "Seconds after which a request has failed.", default=600.0, minimum=0.1, group="Arrivals"
    )

    percentile_metrics: str = option(
        f"Latencies to report, out of {', '.join(METRICS)}.", default=",".join(METRICS), group="Output"
    )
    metric_percentiles: str = option("Percentiles to report of each.", default="90,99", group="Output")
    goodput: str | None = option(
        "Limits in ms, such as ttft:500,tpot:50: requests that meet all of them are counted apart.",
        default=None,
        group="Output",
    )
    save_detailed: bool = option("Keep every request's lengths, latencies and text.", default=False, group="Output")
    plots: bool = option("Draw a picture.", default=True, group="Output")
    out: Path = option("Folder for serve.json, serve.png and the servers' logs.", default=Path("serve"), group="Output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if missing := [name for name in ("httpx", "prometheus_client") if find_spec(name) is None]:
            raise MoelessError(f"moeless bench serve needs {', '.join(missing)}; run: pip install 'moeless[serve]'")
        self._check_server()
        self._check_requests()
        self._check_arrivals()
        _ = self.metric_names, self.percentiles, self.goodput_ms

    def _check_server(self) -> None:
        starts = (self.ep, self.balancer, self.predictors, self.server_args)
        if self.base_url is None and self.model is None:
            raise UsageError("give --base-url for a server that runs, or --model to start one")
        if self.base_url is not None and not re.match(r"https?://[^/]", self.base_url):
            raise UsageError(f"--base-url must begin with http:// or https://, got {self.base_url!r}")
        if self.base_url is not None and any(value is not None for value in starts):
            raise UsageError("--ep, --balancer, --predictors and --server-args have no effect with --base-url")
        names = self.balancer_names
        if self.num_ranks == 1 and len(names) > 1:
            raise UsageError("--ep 1 leaves --balancer nothing to compare; give --ep 2 or more")
        if self.predictors is not None and not set(names) & set(_PREDICTING):
            raise UsageError(f"--predictors has no effect with --balancer {self.balancer}, which predicts nothing")

    def _check_requests(self) -> None:
        is_random = self.dataset_name == "random"
        given = (self.random_input_len, self.random_output_len)
        if not is_random and any(value is not None for value in given):
            raise UsageError("--random-input-len and --random-output-len need --dataset-name random")
        if is_random and self.output_len is not None:
            raise UsageError("--output-len has no effect with --dataset-name random; give --random-output-len")
        if self.trace is not None and (is_random or self.output_len is not None):
            raise UsageError("--dataset-name random and --output-len have no effect with --trace, which has lengths")
        if self.dataset_name == "sharegpt" and self.dataset_path is None:
            raise UsageError("--dataset-name sharegpt needs --dataset-path")

    def _check_arrivals(self) -> None:
        of_trace = (self.time_scale, self.length_scale, self.max_duration_s)
        if self.trace is None and any(value is not None for value in of_trace):
            raise UsageError("--time-scale, --length-scale and --max-duration-s need --trace")
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate must be above 0, got {self.request_rate}")
        if self.trace is not None and self.request_rate != math.inf:
            raise UsageError("--request-rate has no effect with --trace, which has times; give --time-scale")
        if self.burstiness is not None and self.request_rate == math.inf:
            raise UsageError("--burstiness has no effect without --request-rate")

    @property
    def num_ranks(self) -> int:
        """Ranks of the server to start."""
        return self.ep or 2

    @property
    def balancer_names(self) -> tuple[str, ...]:
        """The balancers to start a server for, in order."""
        return parse_names("--balancer", self.balancer or "moeless-roofline", get_args(ServedBalancer))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The latencies to report."""
        return parse_names("--percentile-metrics", self.percentile_metrics, METRICS)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to report, each in [0, 100]."""
        try:
            values = tuple(float(part) for part in self.metric_percentiles.split(","))
        except ValueError:
            values = (math.nan,)
        if not all(0 <= value <= 100 for value in values):
            raise UsageError(f"--metric-percentiles takes numbers from 0 to 100, got {self.metric_percentiles!r}")
        return values

    @property
    def goodput_ms(self) -> dict[str, float]:
        """Limits of a good request by latency; empty without any."""
        limits: dict[str, float] = {}
        for part in re.split(r"[,\s]+", self.goodput.strip()) if self.goodput is not None else ():
            name, _, value = part.partition(":")
            if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", value) or name in limits:
                raise UsageError(
                    f"--goodput takes limits in ms such as ttft:500,tpot:50,e2el:9000, got {self.goodput!r}"
                )
            limits[name] = float(value)
        return limits

    def server_flags(self, balancer: str) -> list[str]:
        """Flags of `moeless serve` for one of the balancers; what the user gave comes last and wins."""
        flags = ["--ep", str(self.num_ranks), "--balancer", balancer, "--max-num-queued-reqs", "1000000"]
        if self.predictors is not None and balancer in _PREDICTING:
            flags += ["--predictors", self.predictors]
        return [*flags, *shlex.split(self.server_args or "")]
