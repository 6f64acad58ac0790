"""The pure parts of `moeless bench serve`: latencies, arrivals, differences of metrics, flags, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.bench.report import run_report
from moeless.bench.serve_experts import describe_experts, parse, total
from moeless.bench.serve_load import LoadRun, Sample, describe_error
from moeless.bench.serve_numbers import describe, details, num_within, same_text_share, summarise
from moeless.bench.serve_print import print_bench_serve
from moeless.bench.serve_requests import due_times_s, fit
from moeless.config.bench_serve import BenchServeConfig
from moeless.config.report import ReportConfig
from moeless.errors import UsageError


def sample(sent_s: float, *token_times_s: float, error: str | None = None, text: str = "a") -> Sample:
    return Sample(
        due_s=sent_s - 0.5,
        num_prompt=10,
        sent_s=sent_s,
        token_times_s=list(token_times_s),
        ended_s=token_times_s[-1] if token_times_s else sent_s + 9,
        num_output=len(token_times_s),
        text=text,
        error=error,
    )


SAMPLES = [sample(1.0, 2.0, 2.5, 4.0), sample(2.0, 2.25), sample(3.0, error="503 queue_full"), sample(5.0, 6.0, 6.5)]
RUN = LoadRun(samples=SAMPLES, duration_s=10.0, client_cpu_share=0.9)


def test_numbers_by_hand() -> None:
    numbers = summarise(RUN, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50, 99.9), goodput_ms={"ttft": 999})
    assert (numbers["completed"], numbers["failed"], numbers["errors"]) == (3, 1, {"503 queue_full": 1})
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (30, 6)
    assert (numbers["request_throughput"], numbers["output_throughput"]) == (0.3, 0.6)
    assert numbers["total_token_throughput"] == 3.6
    assert numbers["request_goodput"] == 0.1  # only the second has its first token within a second
    assert numbers["mean_ttft_ms"] == pytest.approx(750)
    assert numbers["mean_tpot_ms"] == pytest.approx((2000 / 2 + 500) / 2)  # one token has no time per further token
    assert numbers["mean_itl_ms"] == pytest.approx((500 + 1500 + 500) / 3)
    assert numbers["p50_itl_ms"] == numbers["median_itl_ms"] == 500
    assert numbers["p99.9_e2el_ms"] == pytest.approx(np.percentile([3000, 250, 1500], 99.9))
    assert numbers["max_concurrent_requests"] == 2
    assert numbers["send_delay_ms"] == {"p50": 500, "max": 500}


def test_only_what_was_asked_for() -> None:
    numbers = summarise(RUN, metrics=("ttft",), percentiles=(), goodput_ms={})
    assert {key for key in numbers if key.endswith("_ms")} == {
        "mean_ttft_ms",
        "median_ttft_ms",
        "std_ttft_ms",
        "send_delay_ms",
    }
    assert numbers["request_goodput"] is None
    assert describe("itl", [], (99,)) == dict.fromkeys(("mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms"))


def test_goodput_needs_every_limit() -> None:
    good = [s for s in SAMPLES if s.error is None]
    assert num_within(good, {"ttft": 1000, "e2el": 2000}) == 2
    assert num_within(good, {"tpot": 600}) == 2  # the single token has no gap that could be too long
    assert num_within(good, {"ttft": 1000, "tpot": 600, "e2el": 1}) == 0


def test_details_and_same_texts() -> None:
    kept = details(RUN)
    assert kept["ttfts"] == [1.0, 0.25, None, 1.0]
    assert kept["itls"] == [[0.5, 1.5], [], [], [0.5]]
    json.dumps(kept, allow_nan=False)
    changed = [sample(1.0, 2.0), sample(2.0, 2.1, text="b"), sample(3.0, 3.1), sample(5.0, 5.1)]
    assert same_text_share(LoadRun(samples=changed, duration_s=1, client_cpu_share=0), RUN) == pytest.approx(2 / 3)


def test_arrivals_have_the_rate_and_shape_asked_for() -> None:
    assert not due_times_s(5, math.inf, 1.0, 0).any()
    for burstiness, variation in ((1.0, 1.0), (0.25, 2.0), (100.0, 0.1)):
        gaps = np.diff(due_times_s(20_000, 4.0, burstiness, 3))
        assert gaps.mean() == pytest.approx(0.25, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert due_times_s(9, 2.0, 1.0, 1)[0] == 0


@given(st.integers(1, 9_000), st.integers(1, 9_000), st.integers(2, 4_000))
def test_lengths_fit_in_the_context(num_prompt: int, num_output: int, max_model_len: int) -> None:
    prompt, output = fit(num_prompt, num_output, max_model_len)
    assert 1 <= prompt <= num_prompt
    assert 1 <= output <= num_output
    assert prompt + output <= max_model_len
    if num_prompt + num_output <= max_model_len:
        assert (prompt, output) == (num_prompt, num_output)


def metrics_text(tokens: tuple[int, int, int, int], runs: int, cold: int, balance: float) -> str:
    cells = "".join(
        f'moeless:rank_tokens_total{{layer="{i // 2}",rank="{i % 2}"}} {value}\n' for i, value in enumerate(tokens)
    )
    return (
        f"# TYPE moeless:rank_tokens_total counter\n{cells}"
        "# TYPE moeless:moe_layer_forward_seconds histogram\n"
        f'moeless:moe_layer_forward_seconds_count{{layer="0"}} {runs}\n'
        f'moeless:moe_layer_forward_seconds_sum{{layer="0"}} {runs * 0.002}\n'
        "# TYPE moeless:moe_stage_seconds_total counter\n"
        f'moeless:moe_stage_seconds_total{{stage="compute",rank="0"}} {runs * 0.001}\n'
        f'moeless:moe_stage_seconds_total{{stage="compute",rank="1"}} {runs * 0.003}\n'
        "# TYPE moeless:expert_starts_total counter\n"
        f'moeless:expert_starts_total{{kind="cold"}} {cold}\n'
        "# TYPE moeless:balancedness gauge\n"
        f'moeless:balancedness{{layer="0",stage="observed"}} {balance}\n'
        f'moeless:balancedness{{layer="0",stage="static"}} 9\n'
        "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 5\n"
    )


def test_experts_are_differences_and_fresh_samples() -> None:
    before, after = parse(metrics_text((5, 5, 5, 5), 10, 1, 7.0)), parse(metrics_text((35, 15, 25, 25), 30, 4, 3.0))
    idle = parse(metrics_text((5, 5, 5, 5), 10, 1, 7.0))  # no step since: its gauges are of another load
    fresh = [parse(metrics_text((9, 9, 9, 9 + n), 12, 1, balance)) for n, balance in enumerate((1.0, 2.0))]
    experts = describe_experts(before, after, [idle, *fresh, fresh[1]])
    assert experts is not None
    assert (experts["balancedness"], experts["balancedness_static"], experts["num_samples"]) == (2.0, 9.0, 3)
    assert experts["balancedness_of_sums"] == pytest.approx((30 / 20 + 1) / 2)
    assert (experts["expert_tokens"], experts["cold"], experts["num_layer_forwards"]) == (80, 3, 20)
    assert experts["layer_forward_ms"] == pytest.approx(2.0)
    assert experts["stage_ms"] == {"compute": pytest.approx(2.0)}
    assert experts["warm"] is None
    assert total(before, after, "no_such_total") is None
    assert describe_experts({}, parse("# TYPE vllm:x counter\nvllm:x_total 3\n"), []) is None


def test_error_answers_in_a_line() -> None:
    assert describe_error(503, b'{"error": {"message": "full", "code": "queue_full"}}') == "503 queue_full"
    assert describe_error(400, b'{"error": {"message": "no", "code": null}}') == "400 no"
    assert describe_error(502, b"<html>") == "502 <html>"
    assert describe_error(500, b'"x"') == '500 "x"'


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give --base-url"),
        ({"base_url": "localhost:8000"}, "--base-url must begin with http"),
        ({"base_url": "http://x", "ep": 2}, "no effect with --base-url"),
        ({"base_url": "http://x", "balancer": "eplb"}, "no effect with --base-url"),
        ({"model": "m", "ep": 1, "balancer": "static,eplb"}, "leaves --balancer nothing to compare"),
        ({"model": "m", "balancer": "bound"}, "--balancer takes"),
        ({"model": "m", "balancer": "static", "predictors": "p"}, "--predictors has no effect"),
        ({"model": "m", "random_input_len": 4}, "need --dataset-name random"),
        ({"model": "m", "dataset_name": "random", "output_len": 4}, "--output-len has no effect"),
        ({"model": "m", "trace": Path("t.csv"), "output_len": 4}, "have no effect with --trace"),
        ({"model": "m", "dataset_name": "sharegpt"}, "needs --dataset-path"),
        ({"model": "m", "time_scale": 2.0}, "need --trace"),
        ({"model": "m", "request_rate": 0.0}, "--request-rate must be above 0"),
        ({"model": "m", "request_rate": math.nan}, "--request-rate must be above 0"),
        ({"model": "m", "trace": Path("t.csv"), "request_rate": 1.0}, "--request-rate has no effect"),
        ({"model": "m", "burstiness": 1.0}, "--burstiness has no effect"),
        ({"model": "m", "percentile_metrics": "ttft,x"}, "--percentile-metrics takes"),
        ({"model": "m", "metric_percentiles": "101"}, "--metric-percentiles takes numbers"),
        ({"model": "m", "metric_percentiles": "x"}, "--metric-percentiles takes numbers"),
        ({"model": "m", "goodput": "itl:3"}, "--goodput takes limits"),
        ({"model": "m", "goodput": "ttft:x"}, "--goodput takes limits"),
    ],
)
def test_wrong_flags(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchServeConfig(**values)


def test_flags_of_the_server() -> None:
    config = BenchServeConfig(
        model="m", balancer="static,moeless", predictors="p q", server_args="--ep 4 --kv-tokens '64'"
    )
    assert "--predictors" not in config.server_flags("static")
    assert config.server_flags("moeless")[-6:] == ["--predictors", "p q", "--ep", "4", "--kv-tokens", "64"]
    assert BenchServeConfig(model="m", goodput="ttft:5, tpot:0.5").goodput_ms == {"ttft": 5.0, "tpot": 0.5}


def test_tables_report_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = summarise(RUN, metrics=("ttft", "e2el"), percentiles=(99,), goodput_ms={})
    before, after = parse(metrics_text((0, 0, 0, 0), 0, 0, 1.0)), parse(metrics_text((1, 2, 3, 4), 2, 0, 1.5))
    rows = [
        {"name": "static", **numbers, "moe": describe_experts(before, after, [after]), "same_text": None},
        {"name": "moeless", **numbers, "output_throughput": 0.9, "moe": None, "same_text": 1.0},
    ]
    load = {"source": "t.csv", "num_requests": 4, "last_due_s": 5.0, "cut_to_context": 1}
    load |= {"mean_prompt_tokens": 10.0, "mean_output_tokens": 2.0}
    result = {"schema": "moeless.bench-serve/1", "source": "live", "load": load, "runs": rows}
    print_bench_serve(result)
    shown = capsys.readouterr().out
    for text in ("3 / 1", "TTFT p99, ms", "1 cut to the context length", "max/mean rank load", "1 failed: 503", "90%"):
        assert text in shown
    (tmp_path / "serve.json").write_text(json.dumps(result))
    assert run_report(ReportConfig(folder=tmp_path))["results"][0]["num_pictures"] == 1
    page = (tmp_path / "report.html").read_text()
    assert "moeless: 0.9 output tokens a second, 1.500 x static; 2 failed requests" in page
    assert "moe.balancedness" in page
