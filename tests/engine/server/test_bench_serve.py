"""`moeless bench serve` against real servers: what it counts is what the server and its texts say."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeless.bench.serve import run_bench_serve
from moeless.bench.serve_load import LoadRequest
from moeless.bench.serve_requests import TokenizeClient, as_message, make_load
from moeless.config.bench_serve import BenchServeConfig
from moeless.errors import DataError, RankError
from tests.engine.server.running import MODEL, START_S, RunningServer, wait_for
from tests.engine.serving import random_prompts
from tests.traces import real

LAYERS, TOP_K = 12, 2


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "It is so."}]}
        for n in range(2)
    ]
    rows = [{"token_ids": list(range(20, 32))}, {"text": "A list is a kind of"}, *chats]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_counts_and_texts_are_the_servers(
    server: RunningServer, client: httpx.Client, prompts: Path, tmp_path: Path
) -> None:
    made, routed = "moeless:generation_tokens_total", "moeless:rank_tokens_total"
    before = {name: server.metric(name, client) for name in (made, routed)}
    config = BenchServeConfig(
        base_url=server.url,
        dataset_path=str(prompts),
        num_prompts=5,
        output_len=6,
        ignore_eos=True,
        max_concurrency=2,
        request_rate=50.0,
        goodput="e2el:600000",
        save_detailed=True,
        out=tmp_path / "out",
    )
    result = run_bench_serve(config)
    assert result == json.loads((tmp_path / "out" / "serve.json").read_text())
    assert (tmp_path / "out" / "serve.png").exists()
    assert (result["completed"], result["failed"], result["errors"]) == (5, 0, {})
    assert result["source"] == "live"
    assert result["model_id"] == MODEL
    assert result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == result["request_throughput"]
    assert result["total_output_tokens"] == 30 == server.metric(made, client) - before[made]
    kept = result["requests"]["server"]
    assert [len(gaps) for gaps in kept["itls"]] == [5] * 5
    assert result["moe"]["expert_tokens"] == server.metric(routed, client) - before[routed]
    # a completion's last token is never run through the model
    assert result["moe"]["expert_tokens"] == (result["total_input_tokens"] + 5 * 5) * TOP_K * LAYERS
    ids = list(range(20, 32))
    index = kept["input_lens"].index(len(ids))
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert kept["generated_texts"][index] == client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_chat_backend_sends_one_user_message(
    server: RunningServer, client: httpx.Client, prompts: Path, tmp_path: Path
) -> None:
    made, routed = "moeless:generation_tokens_total", "moeless:rank_tokens_total"
    before = {name: server.metric(name, client) for name in (made, routed)}
    common: dict[str, Any] = {"base_url": server.url, "dataset_path": str(prompts), "num_prompts": 4, "output_len": 5}
    common |= {"ignore_eos": True, "save_detailed": True, "plots": False}
    result = run_bench_serve(BenchServeConfig(backend="openai-chat", out=tmp_path / "chat", **common))
    assert (result["completed"], result["failed"], result["errors"]) == (4, 0, {})
    assert result["total_output_tokens"] == 20 == server.metric(made, client) - before[made]
    # the server ran as many prompt tokens as the result says: the template's are among them
    tokens = result["total_input_tokens"] + 4 * 4
    assert server.metric(routed, client) - before[routed] == tokens * TOP_K * LAYERS
    kept = result["requests"]["server"]
    assert [len(gaps) for gaps in kept["itls"]] == [4] * 4  # the chunk that is only a role is no token
    for said in ("A list is a kind of", "Say 1."):
        body = {"messages": [{"role": "user", "content": said}]}
        length = client.post("/tokenize", json=body).json()["count"]
        body |= {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == length
        assert (length, answer["choices"][0]["message"]["content"]) in zip(
            kept["input_lens"], kept["generated_texts"], strict=True
        )
    plain = run_bench_serve(BenchServeConfig(out=tmp_path / "plain", **common))
    assert plain.keys() == result.keys()
    assert plain["config"]["backend"] == "openai"
    assert plain["total_input_tokens"] < result["total_input_tokens"]


def test_messages_are_cut_to_the_context(server: RunningServer, client: httpx.Client, tmp_path: Path) -> None:
    tokens = TokenizeClient(client, MODEL, for_chat=True)
    ids = tokens.text("One two three four, and then a fifth that is the last")
    around = len(tokens.message([])[1])
    request = LoadRequest(due_s=1.0, prompt=tuple(ids), num_output=4)
    fits = as_message(request, tokens, 100)
    assert (fits.message, fits.is_cut) == ("One two three four, and then a fifth that is the last", False)
    assert (len(fits.prompt), fits.num_output, fits.due_s) == (len(ids) + around, 4, 1.0)
    cut = as_message(request, tokens, len(ids) + 4)
    assert cut.message is not None
    assert fits.message.endswith(cut.message)
    assert (len(cut.prompt) <= len(ids), cut.num_output, cut.is_cut) == (True, 4, True)
    bare = as_message(replace(request, num_output=40), tokens, 41)
    assert (bare.message, len(bare.prompt), bare.num_output) == ("", around, 41 - around)

    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"token_ids": ids * 300}))
    common: dict[str, Any] = {"base_url": server.url, "backend": "openai-chat", "save_detailed": True, "plots": False}
    config = BenchServeConfig(**common, dataset_path=str(path), num_prompts=1, output_len=4, out=tmp_path)
    result = run_bench_serve(config)
    assert (result["completed"], result["load"]["cut_to_context"]) == (1, 1)
    assert 1_000 < result["total_input_tokens"] <= 2_048 - 4
    random = {"dataset_name": "random", "random_input_len": 60, "random_output_len": 4, "num_prompts": 3}
    result = run_bench_serve(BenchServeConfig(**common, **random, out=tmp_path))
    assert (result["completed"], result["total_output_tokens"]) == (3, 12)
    assert all(40 <= length <= 90 for length in result["requests"]["server"]["input_lens"])


def test_trace_gives_times_and_lengths(server: RunningServer, tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6800000,10,4", "2023-11-16 18:15:50.6800000,9000,8", "2023-11-16 18:16:50.68,5,5"]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    common = {"base_url": server.url, "trace": trace, "save_detailed": True, "plots": False, "out": tmp_path / "out"}
    result = run_bench_serve(BenchServeConfig(**common, time_scale=0.1, length_scale=0.5, max_duration_s=10))
    kept = result["requests"]["server"]
    assert (kept["input_lens"], kept["output_lens"]) == ([5, 2044], [2, 4])
    assert result["load"]["cut_to_context"] == 1
    assert kept["start_times"][1] >= 0.39
    assert result["duration"] >= 0.4


def test_mooncake_trace_shares_prefixes(server: RunningServer, client: httpx.Client, tmp_path: Path) -> None:
    rows = [  # ms, prompt, output, blocks of 512 tokens
        (0, 1_300, 3, [0, 1, 2]),
        (200, 1_100, 4, [0, 1, 3]),
        (200, 700, 2, [0, 4]),
        (500, 512, 5, [5]),
        (900, 30, 1, [0]),
    ]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    text = tmp_path / "text.jsonl"  # of random tokens: two places in it begin alike only by chance
    text.write_text(json.dumps({"token_ids": random_prompts((8_000,), 4_096)[0]}))
    common: dict[str, Any] = {"base_url": server.url, "trace": trace, "dataset_path": str(text), "plots": False}
    common["out"] = tmp_path / "out"
    config = BenchServeConfig(**common, save_detailed=True)
    prompts = [request.prompt for request in make_load(config, client, MODEL, 2_048).requests]
    shared = {(0, 1): 1_024, (0, 2): 512, (1, 2): 512, (0, 3): 0, (0, 4): 30, (3, 4): 0}
    for (one, other), length in shared.items():
        pairs = list(zip(prompts[one], prompts[other], strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        assert same == length, (one, other)
    half = make_load(replace(config, length_scale=0.5), client, MODEL, 2_048).requests
    assert half[0].prompt[:512] == half[1].prompt[:512] != half[2].prompt[:512]
    assert half[0].prompt[:256] == half[2].prompt[:256]

    result = run_bench_serve(config)
    assert (result["completed"], result["failed"], result["load"]["cut_to_context"]) == (5, 0, 0)
    kept = result["requests"]["server"]
    assert list(zip(kept["input_lens"], kept["output_lens"], strict=True)) == [(row[1], row[2]) for row in rows]
    assert all(sent_s >= row[0] / 1e3 - 0.01 for sent_s, row in zip(kept["start_times"], rows, strict=True))
    chat = run_bench_serve(BenchServeConfig(**common, backend="openai-chat", save_detailed=True, length_scale=0.1))
    assert (chat["completed"], chat["failed"]) == (5, 0)
    assert chat["requests"]["server"]["output_lens"] == [1] * 5


def test_real_trace(server: RunningServer, tmp_path: Path) -> None:
    result = run_bench_serve(
        BenchServeConfig(
            base_url=server.url,
            trace=real("arrivals/azure_llm_2023_conv.csv"),
            num_prompts=4,
            time_scale=0.02,
            length_scale=0.05,
            plots=False,
            out=tmp_path,
        )
    )
    assert (result["completed"], result["failed"]) == (4, 0)
    assert result["load"]["mean_prompt_tokens"] > 10


def test_random_prompts_are_seeded(server: RunningServer, tmp_path: Path) -> None:
    def texts(seed: int) -> list[str]:
        result = run_bench_serve(
            BenchServeConfig(
                base_url=server.url,
                dataset_name="random",
                random_input_len=8,
                random_output_len=4,
                num_prompts=3,
                seed=seed,
                save_detailed=True,
                plots=False,
                out=tmp_path,
            )
        )
        assert result["total_input_tokens"] == 24
        assert result["config"]["request_rate"] == "inf"
        return result["requests"]["server"]["generated_texts"]

    assert texts(1) == texts(1) != texts(2)


def test_failures_are_counted_and_said(server: RunningServer, prompts: Path, tmp_path: Path) -> None:
    common = {"dataset_path": str(prompts), "num_prompts": 2, "plots": False, "out": tmp_path}
    slow = BenchServeConfig(base_url=server.url, output_len=1_900, ignore_eos=True, request_timeout_s=0.1, **common)
    with pytest.raises(RankError, match=r"every request failed: no end within 0\.1 s"):
        run_bench_serve(slow)
    result = json.loads((tmp_path / "serve.json").read_text())
    assert (result["completed"], result["failed"]) == (0, 2)
    assert result["mean_ttft_ms"] is None
    assert math.isfinite(result["duration"])
    with pytest.raises(DataError, match="says 404"):
        run_bench_serve(BenchServeConfig(base_url=server.url, model="another", **common))
    with pytest.raises(RankError, match="is a server running there"):
        run_bench_serve(BenchServeConfig(base_url="http://127.0.0.1:9", **common))


def test_server_that_does_not_start(demo_model: Path, tmp_path: Path) -> None:
    config = BenchServeConfig(model=str(demo_model), server_args="--expert-slots 3 --ep 1", out=tmp_path)
    with pytest.raises(RankError, match=r"the server ended: --expert-slots 3 has no effect on one rank; see .*\.log"):
        run_bench_serve(config)


def test_server_ends_with_the_benchmark(demo_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moeless", "bench", "serve", "--model", str(demo_model), "--ep", "1"]
    log = tmp_path / "server-moeless-roofline.log"
    with subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: log.exists() and "listening at " in log.read_text(), START_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    url = log.read_text().partition("listening at ")[2].partition(",")[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
def test_balancers_get_the_same_requests(demo_model: Path, prompts: Path, tmp_path: Path) -> None:
    result = run_bench_serve(
        BenchServeConfig(
            model=str(demo_model),
            balancer="static,moeless-roofline",
            dataset_path=str(prompts),
            num_prompts=4,
            output_len=12,
            ignore_eos=True,
            out=tmp_path,
        )
    )
    static, ours = result["runs"]
    assert [row["name"] for row in result["runs"]] == ["static", "moeless-roofline"]
    assert static["total_input_tokens"] == ours["total_input_tokens"]
    assert ours["same_text"] == 1.0
    tokens = (static["total_input_tokens"] + 4 * 11) * TOP_K * LAYERS
    assert static["moe"]["expert_tokens"] == ours["moe"]["expert_tokens"] == tokens
    for row in (static, ours):
        experts = row["moe"]
        assert experts["layer_forward_ms"] > experts["straggler_ms"] > 0
        assert experts["billed_gb_s"] > 0
        assert experts["resident_gb_s"] > 0
        assert experts["warm"] > 0
        assert experts["balancedness_of_sums"] >= 1
    assert "completed" not in result  # several runs have no numbers in common
