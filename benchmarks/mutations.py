"""Valid requests and what can be done to them: by structure, by bytes, and by how they are sent. All from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "demo"
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20,
        "n": 1, "seed": 3, "stop": ["\n\n"], "logit_bias": {"5": 1.5}, "logprobs": 2, "echo": False, "stream": False,
        "presence_penalty": 0.5, "frequency_penalty": 0.1, "min_tokens": 0, "stop_token_ids": [7], "user": "u",
    },
    "/v1/chat/completions": {
        "model": MODEL, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "max_tokens": 4, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
        "top_logprobs": 2, "chat_template_kwargs": {}, "add_generation_prompt": True,
    },
    "/tokenize": {"model": MODEL, "prompt": "Hello", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": MODEL, "tokens": [5, 6, 7]},
    "/scale": {"ep": 1_000},  # refused: the run is to end with the ranks it began with
}  # fmt: skip
DEEP = 20_000
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**20), 0.1, 1e308, -1e308, float("nan"),
    float("inf"), -float("inf"), "", "x", "\0", "\ud800", "\udfff\ud83d", "😀" * 50, "\u202eabc", "é" * 3000, "null",
    "../../etc/passwd", "<script>", "{{ 7*7 }}", "{% for i in range(10**9) %}x{% endfor %}", [], [[]], [None], [1, "x"],
    [-1], [2**31], [[1, 2], ["x"]], list(range(100)), {}, {"a": 1}, {"type": "image_url", "image_url": {"url": "file:///"}},
    [{"role": "user", "content": "x"}] * 50, "a" * 100_000, [f"s{i}" for i in range(10_000)], [5] * 20_000,
    {str(i): 1 for i in range(10_000)}, 10**6, 128, 129,
]  # fmt: skip
KEYS = ["tools", "response_format", "chat_template", "documents", "guided_json", "best_of", "suffix", "prompt_embeds",
        "__proto__", "__class__", "self", "model_config", "request_id", "messages", "prompt", "n", "max_tokens",
        "min_p", "repetition_penalty", "truncate_prompt_tokens", "ignore_eos", "skip_special_tokens", "top_logprobs",
        "return_routed_experts", "continue_final_message", "stop", "logit_bias", "stream_options"]  # fmt: skip
_SIZE = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One request: what goes over the wire, and how."""

    kind: str
    wire: bytes
    is_valid: bool = False
    parts: tuple[bytes, ...] = field(default=())
    """Sent after `wire`, each after a moment."""
    leaves_after: int | None = None
    """Bytes of the answer after which the client goes; None: it reads all."""
    closes: bool = False
    """The connection can't be used again."""


def make_attack(rng: random.Random) -> Attack:
    """The next attack."""
    name = rng.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])[0]
    return _KINDS[name][0](rng, name)


def http(path: str, body: bytes, headers: str = "", method: str = "POST") -> bytes:
    """A whole request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + headers + "\r\n").encode("latin-1") + body


def valid(rng: random.Random, kind: str) -> Attack:
    """A greedy completion whose answer is known."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return Attack(kind=kind, wire=http("/v1/completions", json.dumps(body).encode()), is_valid=True)


def _json(rng: random.Random, kind: str) -> Attack:
    path, body = _some(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        _mutate(rng, body)
    if path == "/scale" and type(body.get("ep")) is int:
        body["ep"] = max(body["ep"], 1_000) if body["ep"] > 0 else body["ep"]
    return Attack(kind=kind, wire=http(path, _dump(rng, body)))


def _some(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice(list(VALID))
    return path, copy.deepcopy(VALID[path])


def _mutate(rng: random.Random, body: dict[str, Any]) -> None:
    """Change one place, at any depth."""
    where: Any = body
    while rng.random() < 0.4:
        inner = [
            value for value in (where.values() if isinstance(where, dict) else where) if isinstance(value, dict | list)
        ]
        if not inner:
            break
        where = rng.choice(inner)
    value = copy.deepcopy(rng.choice(ODD))
    if isinstance(where, list):
        where.insert(rng.randint(0, len(where)), value)
    elif rng.random() < 0.1 and where:
        del where[rng.choice(list(where))]
    else:
        where[rng.choice([*where, *KEYS])] = value


def _dump(rng: random.Random, body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.7)
    return text.encode("utf-8", "surrogatepass")


def _deep(rng: random.Random, kind: str) -> Attack:
    path, body = _some(rng)
    body[rng.choice([*body, *KEYS])] = "DEEP"
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    nested = opening * DEEP + "1" + closing * rng.choice([0, DEEP])
    return Attack(kind=kind, wire=http(path, json.dumps(body).replace('"DEEP"', nested).encode()))


def _twice(rng: random.Random, kind: str) -> Attack:
    path, body = rng.choice([(path, body) for path, body in VALID.items() if path != "/scale"])
    other = json.dumps({rng.choice(list(body)): rng.choice([x for x in ODD if x is None or isinstance(x, int | str)])})
    return Attack(kind=kind, wire=http(path, (json.dumps(body)[:-1] + "," + other[1:]).encode("utf-8", "replace")))


def _bytes(rng: random.Random, kind: str) -> Attack:
    path, body = _some(rng)
    content = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.choice([0, 0x80, 0xFF, 0xC3, 0x22, 0x7B, rng.randrange(256)])
    cut = rng.choice([None, None, rng.randrange(len(content))])
    return Attack(kind=kind, wire=http(path, bytes(content[:cut])))


def _big(rng: random.Random, kind: str) -> Attack:
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
    body = copy.deepcopy(VALID[path])
    what = rng.randrange(6)
    if what == 0:
        text = rng.choice(["a ", "é", "\0", "😀"]) * (_SIZE // 4)
        body |= {"messages": [{"role": "user", "content": text}]} if "messages" in body else {"prompt": text}
    elif what == 1:
        body["logit_bias"] = {str(i): 1 for i in range(1_000_000)}
    elif what == 2:
        body["prompt"] = [5] * 2_000_000
    elif what == 3:
        body["prompt"] = [[5]] * 2_000_000
    elif what == 4:
        body["padding"] = [{}] * 3_000_000
    else:
        body["padding"] = "x" * 17_000_000
    return Attack(kind=kind, wire=http(path, json.dumps(body, ensure_ascii=False).encode()), closes=what == 5)


def _head(rng: random.Random, kind: str) -> Attack:
    """A sound body under a header that is not."""
    path, values = _some(rng)
    body = json.dumps(values).encode()
    kinds = ["", "text/plain", "application/xml", "multipart/form-data; boundary=x", "application/json; charset=utf-16"]
    length, bearer = f"Content-Length: {len(body)}\r\n\r\n", "Authorization: Bearer \xff\r\n"
    lines = [
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {rng.choice(kinds)}\r\nContent-Length: {len(body)}\r\n\r\n",
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nContent-Encoding: gzip\r\n\r\n",
        f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n",
        f"POST {path}{'?x=' + 'y' * 5000} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n",
        f"POST {path}/%00%ff/..%2f HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n",
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-ID: {'i' * rng.choice([3, 300, 9000])}\r\n{bearer}{length}",
    ]
    return Attack(kind=kind, wire=rng.choice(lines).encode("latin-1") + body)


def _protocol(rng: random.Random, kind: str) -> Attack:
    """Requests that break HTTP; the server closes the connection."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = json.dumps(VALID["/v1/completions"])
    wires = [
        f"{head}Content-Length: 5\r\n\r\n{body}",
        f"{head}Content-Length: -1\r\n\r\n{body}",
        f"{head}Content-Length: {'9' * 40}\r\n\r\n{body}",
        f"{head}Content-Length: {len(body)}\r\nContent-Length: 7\r\n\r\n{body}",
        f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n{body}\r\n0\r\n\r\n",
        f"{head}Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "GET /health HTTP/1.0\r\n\r\n",
        "GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        "\r\n\r\n\0\x01\x02",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /metrics HTTP/1.1\r\n\r\n",
        f"GET /{'a' * 70_000} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\n" + "".join(f"X-{i}: {'y' * 900}\r\n" for i in range(200)) + "\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
    ]
    return Attack(kind=kind, wire=rng.choice(wires).encode("latin-1"), closes=True)


def _cut(rng: random.Random, kind: str) -> Attack:
    """A client that goes inside its own request."""
    path, body = _some(rng)
    whole = http(path, json.dumps(body).encode())
    return Attack(kind=kind, wire=whole[: rng.randrange(1, len(whole))], leaves_after=0, closes=True)


def _gone(rng: random.Random, kind: str) -> Attack:
    """A client that asks for much and goes while it is being made."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    body = {**VALID[path], "max_tokens": 1_500, "stream": rng.random() < 0.7, "n": rng.choice([1, 2, 4])}
    if not body["stream"]:
        body.pop("stream_options", None)
    wire = http(path, json.dumps(body).encode())
    return Attack(kind=kind, wire=wire, leaves_after=rng.choice([0, 1, 500]), closes=True)


def _slow(rng: random.Random, kind: str) -> Attack:
    """A client that sends its request in drops."""
    path, body = _some(rng)
    wire = http(path, json.dumps(body).encode())
    step = max(1, len(wire) // 12)
    parts = [wire[i : i + step] for i in range(0, len(wire), step)]
    return Attack(kind=kind, wire=parts[0], parts=tuple(parts[1:]))


_KINDS: dict[str, tuple[Callable[[random.Random, str], Attack], float]] = {
    "valid": (valid, 5),
    "json": (_json, 55),
    "twice": (_twice, 5),
    "deep": (_deep, 3),
    "bytes": (_bytes, 12),
    "big": (_big, 0.5),
    "head": (_head, 7),
    "protocol": (_protocol, 5),
    "cut": (_cut, 3),
    "gone": (_gone, 3),
    "slow": (_slow, 1.5),
}
