"""The service's metrics, in one registry of the front end, whichever ranks they come from.

Serving metrics carry vLLM's names, units and buckets after `moeless:`, so that dashboards need only another prefix.
Ranks send running sums; differences are added here, so counters go on ascending when ranks come and go.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from moeless.engine.expert_metrics import ExpertMetrics
from moeless.engine.ledger import Entry
from moeless.engine.request import FinishReason

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)


class ServiceMetrics:
    """See the module's head."""

    def __init__(self, model_name: str, *, expert_detail: bool) -> None:
        """Start at zero."""
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._model = model_name
        self._sums: dict[tuple[int, str], float] = {}
        self.experts = ExpertMetrics(expert_detail)
        self._registry.register(self.experts)
        self.silence_s = 0.0
        self._make_counters()
        self._make_gauges()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of completions that were begun.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens sent to clients or counted as made.")
        self._success = self._counter("request_success", "Completions that ended, by reason.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests answered 503, by reason.", "reason")
        self._preemptions = self._counter("num_preemptions", "Sequences that gave up their key-value cache.")
        self._failures = self._counter("rank_failures", "Ranks that were lost, by reason.", "reason")

    def _make_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Sequences in a rank's batch.", "engine")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait on a rank.", "engine")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Used over all token slots of a rank, 0 to 1.", "engine")
        self._ranks = self._gauge("ep_ranks", "Ranks that work, and processes that are to be ranks.", "state")
        self._age = self._gauge(
            "last_step_age_seconds",
            "Seconds since the quietest rank's last word, which comes after every step and about once a second, or "
            "since the ranks were lost.",
        )
        self._age.set_function(lambda: self.silence_s)

    def _make_histograms(self) -> None:
        self._ttft = self._histogram("time_to_first_token_seconds", "First token's time minus arrival.", _TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "A token's time minus the last one's.", _TOKEN_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "(last - first token's time) / (tokens - 1).", _TOKEN_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Last token's time minus arrival.", _REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "First step's begin minus arrival.", _REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "First token minus first step.", _REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", "Last token minus first token.", _REQUEST_S)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a completion.", _TOKENS)
        self._length = self._histogram("request_generation_tokens", "Tokens made for a completion.", _TOKENS)
        self._recovery = self._histogram(
            "recovery_seconds", "From the notice that a rank was lost until a group of ranks works again.", _REQUEST_S
        )
        self._step = self._histogram("iteration_tokens", "Tokens of a rank's step that made any.", _STEP_TOKENS)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def reject(self, reason: str) -> None:
        """Count a request that was answered 503."""
        self._rejections.labels(self._model, reason).inc()

    def count_step(self, num_tokens: int) -> None:
        """Count a rank's step."""
        self._step.labels(self._model).observe(num_tokens)

    def count_token(self, entry: Entry, now_s: float) -> None:
        """Count a completion's newest token; `entry.last_s` is still the one before."""
        self._generation_tokens.labels(self._model).inc()
        if entry.last_s is not None:
            self._itl.labels(self._model).observe(now_s - entry.last_s)
            return
        first_s = now_s - entry.arrived_s
        self._prompt_tokens.labels(self._model).inc(len(entry.submission.prompt))
        self._ttft.labels(self._model).observe(first_s)
        self._queue.labels(self._model).observe(entry.queue_s)
        self._prefill.labels(self._model).observe(max(0.0, first_s - entry.queue_s))

    def count_end(self, entry: Entry, reason: FinishReason, now_s: float) -> None:
        """Count a completion's end."""
        self._success.labels(self._model, reason).inc()
        self._e2e.labels(self._model).observe(now_s - entry.arrived_s)
        self._prompt_length.labels(self._model).observe(len(entry.submission.prompt))
        self._length.labels(self._model).observe(len(entry.made))
        if entry.first_s is None and reason == "length":
            self._prompt_tokens.labels(self._model).inc(len(entry.submission.prompt))
        if entry.first_s is not None:
            self._decode.labels(self._model).observe(now_s - entry.first_s)
            if len(entry.made) > 1:
                self._tpot.labels(self._model).observe((now_s - entry.first_s) / (len(entry.made) - 1))

    def start_group(self) -> None:
        """Another group of ranks begins, with its sums at zero."""
        self._sums.clear()
        self.experts.start_team()
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.clear()

    def set_ranks(self, num_alive: int, num_joining: int, silence_s: float) -> None:
        """How many work and are to work, and how long the quietest one has been silent."""
        self._ranks.labels(self._model, "alive").set(num_alive)
        self._ranks.labels(self._model, "joining").set(num_joining)
        self.silence_s = silence_s

    def lose_rank(self, reason: str) -> None:
        """A rank is gone."""
        self._failures.labels(self._model, reason).inc()

    def recover(self, pause_s: float) -> None:
        """A group works again."""
        self._recovery.labels(self._model).observe(pause_s)

    def update_rank(self, rank: int, values: dict[str, Any]) -> None:
        """Take in a rank's statistics."""
        engine = str(rank)
        self._running.labels(self._model, engine).set(values["running"])
        self._waiting.labels(self._model, engine).set(values["waiting"])
        self._kv_usage.labels(self._model, engine).set(values["kv_tokens_used"] / values["kv_tokens"])
        self._preemptions.labels(self._model).inc(self._gain(rank, "preemptions", values["preemptions"]))
        if values["experts"] is not None:
            self.experts.update_rank(rank, values["experts"])

    def _gain(self, rank: int, name: str, value: float) -> float:
        gain = value - self._sums.get((rank, name), 0.0)
        self._sums[rank, name] = value
        return max(0.0, gain)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        counter = Counter(f"moeless:{name}", help, ("model_name", *labels), registry=self._registry)
        if not labels:
            counter.labels(self._model)
        return counter

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        if not labels:
            return Gauge(f"moeless:{name}", help, registry=self._registry)
        return Gauge(f"moeless:{name}", help, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"moeless:{name}", help, ("model_name",), registry=self._registry, buckets=buckets)
        histogram.labels(self._model)
        return histogram
