"""The API over real HTTP against a real server on the bundled model, with OpenAI's own client where it has the call."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeless.trace.formats import read_trace
from tests.engine.server.running import MODEL, RunningServer, events, wait_for
from tests.engine.serving import greedy_reference, near_tie, random_prompts

GREEDY = {"model": MODEL, "temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "Name three colours."}]
NUM_LAYERS, TOP_K, CONTEXT = 12, 2, 2048


@pytest.fixture
def sdk(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**GREEDY, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**GREEDY, "stream": True, **body}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return list(events(response))


def test_chat_through_the_sdk(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    content = choice.logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(item.top_logprobs) == 3 for item in content)
    assert content[0].top_logprobs[0].token == content[0].token  # greedy
    assert "".join(item.token for item in content).startswith(choice.message.content[:5])

    chunks = list(
        sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert len(chunks) == 1 + answer.usage.completion_tokens + 1  # role, one a token, usage
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


def test_models_through_the_sdk(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "moeless"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("a/b")


def test_sdk_error_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="<b>other</b>", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=CONTEXT)
    assert bad.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 2048 tokens. However" in bad.value.message
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError) as tools:
        sdk.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool])
    assert tools.value.param == "tools"


def test_greedy_tokens_are_those_of_transformers(demo_model: Path, server: RunningServer) -> None:
    """Sixteen at once, half of them streamed."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype="float32")
    prompts = random_prompts([3, 40, 7, 90, 21, 5, 64, 12] * 2, 4096)
    expected = greedy_reference(model, prompts, 12)

    def tokens_of(number: int) -> list[str]:
        body = {"prompt": prompts[number], "max_tokens": 12, "logprobs": 0, "skip_special_tokens": False}
        with server.client() as client:
            if number % 2:
                return [e["choices"][0]["logprobs"]["tokens"][0] for e in stream(client, **body)]
            names: list[str] = complete(client, **body)["choices"][0]["logprobs"]["tokens"]
            return names

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(tokens_of, range(16)))
    for names, prompt, tokens in zip(results, prompts, expected, strict=True):
        same = names == [tokenizer.decode([t]) for t in tokens]
        assert same or near_tie(model, prompt, _ids(tokenizer, names, tokens), tokens), (names, tokens)


def _ids(tokenizer: Any, names: list[str], expected: list[int]) -> list[int]:
    """Ids of tokens given by their text; where it is the expected token's text, that token."""
    by_text = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    return [e if name == tokenizer.decode([e]) else by_text[name] for name, e in zip(names, expected, strict=True)]


def test_prompts_of_all_kinds_agree(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Once upon a time"}
    single = complete(client, prompt="Once upon a time", max_tokens=6)
    assert complete(client, prompt=ids, max_tokens=6)["choices"] == single["choices"]
    several = complete(client, prompt=["Hello", "Once upon a time"], max_tokens=6)
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert several["choices"][1]["text"] == single["choices"][0]["text"]
    assert complete(client, prompt=[ids, ids], max_tokens=6)["usage"]["completion_tokens"] == 12


def test_echo_and_logprobs_as_lm_eval_reads_them(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "The cat sat on the mat"}).json()["tokens"]
    scored = complete(client, prompt=[ids], echo=True, logprobs=1, max_tokens=1, seed=1234)["choices"][0]
    logprobs = scored["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for own, top, token in list(zip(*(logprobs[k] for k in ("token_logprobs", "top_logprobs", "tokens")), strict=True))[
        1:
    ]:
        assert top[token] == own
        assert max(top.values()) >= own
    assert scored["text"] == "".join(logprobs["tokens"])
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    only_prompt = complete(client, prompt=[ids], echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert only_prompt["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs["token_logprobs"][1:-1], abs=1e-4)
    assert only_prompt["finish_reason"] == "length"
    streamed = stream(client, prompt=[ids], echo=True, logprobs=1, max_tokens=1)
    assert streamed[0]["choices"][0]["logprobs"]["tokens"] == logprobs["tokens"]
    assert len(streamed[0]["choices"][0]["logprobs"]["top_logprobs"]) == len(ids) + 1


def test_stop_strings_and_stop_tokens(client: httpx.Client) -> None:
    whole = complete(client, prompt="Once upon a time", max_tokens=20, logprobs=0)["choices"][0]
    stop = whole["text"][9:14]
    cut = complete(client, prompt="Once upon a time", max_tokens=20, stop=[stop])["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (
        whole["text"][: whole["text"].index(stop)],
        "stop",
        stop,
    )
    streamed = stream(client, prompt="Once upon a time", max_tokens=20, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == cut["text"]
    assert [e["choices"][0]["finish_reason"] for e in streamed if e["choices"][0]["finish_reason"]] == ["stop"]


def test_samples_depend_on_their_seed_only(client: httpx.Client) -> None:
    body = {"prompt": ["Hello there", "Hello there"], "n": 2, "max_tokens": 12, "temperature": 1.0, "seed": 7}
    texts = [choice["text"] for choice in complete(client, **body)["choices"]]
    assert texts[0] != texts[1]
    assert texts[:2] == texts[2:]  # the same prompt with the same seed
    streamed = stream(client, **body)
    joined = ["".join(e["choices"][0]["text"] for e in streamed if e["choices"][0]["index"] == i) for i in range(4)]
    assert joined == texts
    other = complete(client, **{**body, "seed": 8})["choices"]
    assert [choice["text"] for choice in other] != texts


@pytest.mark.parametrize("running", [False, True])
def test_usage_in_streams_only_if_asked_for(client: httpx.Client, running: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": running}
    streamed = stream(client, prompt=[5, 6], max_tokens=3, stream_options=options)
    total = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert streamed[-1]["usage"] == total
    assert streamed[-1]["choices"] == []
    counts = [event["usage"] and event["usage"]["completion_tokens"] for event in streamed[:-1]]
    assert counts == ([1, 2, 3] if running else [None] * 3)
    assert all("usage" not in event for event in stream(client, prompt="Hello", max_tokens=3))


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "param"),
    [
        ("POST", "/v1/completions", b"{", 400, None),
        ("POST", "/v1/completions", b"", 400, None),
        ("POST", "/v1/completions", b"[]", 400, None),
        ("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
        ("POST", "/v1/completions", b'{"prompt": ""}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": []}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": [999999]}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": "x", "seed": 1' + b"0" * 6000 + b"}", 400, None),
        ("POST", "/v1/completions", b'{"prompt": ' + b"[" * 100_000, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "' + b"a " * 1_000_000 + b'"}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"prompt": "x", "logit_bias": {"999999": 1}}', 400, "logit_bias"),
        ("POST", "/v1/completions", b'{"prompt": "x", "stream_options": {}}', 400, "stream_options"),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "tool", "content": "x"}]}', 400, "messages[0].role"),
        (
            "POST",
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}',
            400,
            "messages[0].content[0]",
        ),
        (
            "POST",
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}',
            400,
            "chat_template_kwargs",
        ),
        (
            "POST",
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
            400,
            "response_format",
        ),
        ("POST", "/tokenize", b"{}", 400, "prompt"),
        ("POST", "/detokenize", b'{"tokens": [99999]}', 400, "tokens"),
        ("GET", "/v1/completions", b"", 405, None),
        ("POST", "/v1/embeddings", b"{}", 404, None),
        ("POST", "/dump_expert_distribution_record", b"", 409, None),
        ("POST", "/stop_expert_distribution_record", b"", 409, None),
    ],
)
def test_errors_have_openais_shape(
    client: httpx.Client, method: str, path: str, content: bytes, status: int, param: str | None
) -> None:
    response = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_bodies_over_the_limit_are_refused_unread(server: RunningServer, client: httpx.Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    declared = b"Content-Length: 99999999999\r\n\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 17
    for rest in (declared, chunked):
        with socket.create_connection(("127.0.0.1", _port(server)), timeout=30) as raw:
            raw.sendall(head + rest)
            assert raw.recv(12) == b"HTTP/1.1 413"
    answer = client.post("/v1/completions", content=b" " * (17 << 20))  # a client that sends all before it reads
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=30) as raw:  # one that waits to be asked
        raw.sendall(head + b"Expect: 100-continue\r\n" + declared)
        assert raw.recv(12) == b"HTTP/1.1 413"
    assert client.get("/health").status_code == 200


def test_a_flood_of_headers_is_cut_off(server: RunningServer, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=30) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        flood = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1_000) for number in range(50_000))
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            raw.sendall(flood)
    assert client.get("/health").status_code == 200


def test_a_client_that_goes_frees_its_slot(server: RunningServer, client: httpx.Client) -> None:
    before = server.metric("moeless:request_success_total", client, finished_reason="abort")
    long = {**GREEDY, "prompt": "Hello", "max_tokens": 1500}
    with client.stream("POST", "/v1/completions", json={**long, "stream": True}) as response:
        next(iter(response.iter_lines()))
    body = json.dumps(long).encode()
    with socket.create_connection(("127.0.0.1", _port(server))) as raw:  # not streaming
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_for(lambda: server.metric("moeless:num_requests_running", client) > 0, 10)
    wait_for(lambda: server.metric("moeless:num_requests_running", client) == 0, 5)
    assert server.metric("moeless:request_success_total", client, finished_reason="abort") == before + 2


def _port(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_one_bad_request_disturbs_no_other(client: httpx.Client, server: RunningServer) -> None:
    expected = complete(client, prompt="Hello there", max_tokens=24)["choices"][0]["text"]

    def bad(number: int) -> int:
        with server.client() as other:
            return other.post("/v1/completions", json={"prompt": [[1], [2], [10**6 + number]]}).status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = pool.map(bad, range(20))
        assert complete(client, prompt="Hello there", max_tokens=24)["choices"][0]["text"] == expected
        assert set(statuses) == {400}


def test_metrics_add_up(server: RunningServer, client: httpx.Client) -> None:
    names = ("expert_tokens_total", "rank_tokens_total", "prompt_tokens_total", "generation_tokens_total")
    before = {name: server.metric(f"moeless:{name}", client) for name in names}
    complete(client, prompt=[[5] * 30, [6] * 10], max_tokens=7)
    gained = {name: server.metric(f"moeless:{name}", client) - before[name] for name in names}
    assert gained["prompt_tokens_total"] == 40
    assert gained["generation_tokens_total"] == 14
    # the last token of each is never run
    assert gained["expert_tokens_total"] == gained["rank_tokens_total"] == (40 + 2 * 6) * TOP_K * NUM_LAYERS
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    assert all(family.documentation for family in families)
    ttft = next(f for f in families if f.name == "moeless:time_to_first_token_seconds")
    assert ttft.samples[-1].labels["model_name"] == MODEL


def test_expert_distribution_record(server: RunningServer, client: httpx.Client) -> None:
    assert client.post("/start_expert_distribution_record").json()["num_steps"] > 100
    assert client.post("/start_expert_distribution_record").status_code == 409
    complete(client, prompt=[7] * 20, max_tokens=4)
    assert client.post("/stop_expert_distribution_record").json()["num_steps"] == 4
    dumped = client.post("/dump_expert_distribution_record").json()
    trace = read_trace(server.log_path.parent / dumped["path"])
    assert trace.num_tokens_I.tolist() == [20, 1, 1, 1]
    assert (trace.counts_ILE.sum((1, 2)) == trace.num_tokens_I * TOP_K * NUM_LAYERS).all()


def test_small_things(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok", "ranks": 1}
    assert client.get("/ready").status_code == 200
    assert client.get("/version").json()["version"]
    response = client.post(
        "/v1/completions", json={**GREEDY, "prompt": "x", "max_tokens": 1}, headers={"X-Request-ID": "abc"}
    )
    assert response.headers["x-request-id"] == "abc"
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
