"""From samples to numbers, under the names of vLLM's result files. All latencies are in ms, of requests that succeeded.

TTFT: first token minus sending. ITL: the gaps between tokens, over all requests. E2EL: last token minus sending.
TPOT: (E2EL - TTFT) / (tokens - 1), so it leaves out the first token; requests of one token have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from moeless.bench.serve_load import LoadRun, Sample

Latencies = dict[str, list[float]]


def summarise(
    run: LoadRun, *, metrics: Sequence[str], percentiles: Sequence[float], goodput_ms: dict[str, float]
) -> dict[str, Any]:
    """Counts, rates and latency statistics of one run."""
    good = [sample for sample in run.samples if sample.error is None]
    num_input, num_output = sum(s.num_prompt for s in good), sum(s.num_output for s in good)
    seconds = run.duration_s
    latencies = latencies_ms(good)
    statistics: dict[str, Any] = {}
    for name in metrics:
        statistics |= describe(name, latencies[name], percentiles)
    delays = [1e3 * (s.sent_s - s.due_s) for s in run.samples]
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(run.samples) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": num_within(good, goodput_ms) / seconds if goodput_ms else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": most_at_once(run.samples),
        **statistics,
        "send_delay_ms": {"p50": float(np.percentile(delays, 50)), "max": max(delays)},
        "client_cpu_share": run.client_cpu_share,
        "errors": dict(Counter(s.error for s in run.samples if s.error is not None).most_common(10)),
    }


def latencies_ms(samples: Sequence[Sample]) -> Latencies:
    """Every kind of latency: one value a request, for ITL one a gap."""
    tpots = [tpot for sample in samples if (tpot := tpot_ms(sample)) is not None]
    return {
        "ttft": [ttft_ms(sample) for sample in samples],
        "tpot": tpots,
        "itl": [gap for sample in samples for gap in itls_ms(sample)],
        "e2el": [e2el_ms(sample) for sample in samples],
    }


def ttft_ms(sample: Sample) -> float:
    """Time to first token."""
    return 1e3 * (sample.token_times_s[0] - sample.sent_s)


def e2el_ms(sample: Sample) -> float:
    """End-to-end latency."""
    return 1e3 * (sample.token_times_s[-1] - sample.sent_s)


def tpot_ms(sample: Sample) -> float | None:
    """Time per output token after the first; None for a single token."""
    if sample.num_output < 2:
        return None
    return (e2el_ms(sample) - ttft_ms(sample)) / (sample.num_output - 1)


def itls_ms(sample: Sample) -> list[float]:
    """The gaps between a request's tokens."""
    return (1e3 * np.diff(sample.token_times_s)).tolist()


def num_within(samples: Sequence[Sample], limits_ms: dict[str, float]) -> int:
    """Requests that meet every limit; a request of one token meets any limit of its TPOT."""
    measures = {"ttft": ttft_ms, "tpot": lambda s: tpot_ms(s) or 0.0, "e2el": e2el_ms}
    return sum(all(measures[name](sample) <= limit for name, limit in limits_ms.items()) for sample in samples)


def describe(name: str, values_ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """`mean_NAME_ms`, median, std and each percentile, such as `p99_NAME_ms`; all None without values."""
    keys = ["mean", "median", "std", *(f"p{q:g}" for q in percentiles)]
    if not values_ms:
        return dict.fromkeys((f"{key}_{name}_ms" for key in keys), None)
    values = np.asarray(values_ms, float)
    numbers = [values.mean(), np.median(values), values.std(), *np.percentile(values, percentiles)]
    return {f"{key}_{name}_ms": float(number) for key, number in zip(keys, numbers, strict=True)}


def most_at_once(samples: Sequence[Sample]) -> int:
    """The largest number of requests in flight."""
    times = sorted([(s.sent_s, 1) for s in samples] + [(s.ended_s, -1) for s in samples])
    return int(np.cumsum([change for _, change in times]).max())


def details(run: LoadRun) -> dict[str, Any]:
    """Every request's own numbers, in seconds as in vLLM's files."""
    ok = [sample.error is None for sample in run.samples]
    return {
        "input_lens": [s.num_prompt for s in run.samples],
        "output_lens": [s.num_output for s in run.samples],
        "ttfts": [ttft_ms(s) / 1e3 if good else None for s, good in zip(run.samples, ok, strict=True)],
        "itls": [[gap / 1e3 for gap in itls_ms(s)] for s in run.samples],
        "latencies": [e2el_ms(s) / 1e3 if good else None for s, good in zip(run.samples, ok, strict=True)],
        "start_times": [s.sent_s for s in run.samples],
        "generated_texts": [s.text for s in run.samples],
        "errors_by_request": [s.error for s in run.samples],
    }


def same_text_share(run: LoadRun, first: LoadRun) -> float | None:
    """Of the requests that succeeded in both runs, the share that got the same text; None when there are none."""
    pairs = [
        a.text == b.text for a, b in zip(run.samples, first.samples, strict=True) if a.error is None and b.error is None
    ]
    return sum(pairs) / len(pairs) if pairs else None
