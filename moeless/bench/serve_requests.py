"""The requests of a load: prompts from text, from random tokens, or as long as a trace says, and when each is due.

The server's own `/tokenize` makes ids from text. So lengths are exact, and no tokenizer is loaded here. For the chat
endpoint the ids are made text again, as much as fits with the template around it.

Legend: N requests, P tokens of the pool that prompts are cut from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from moeless.bench.arrivals import BLOCK_TOKENS, Arrivals, read_arrivals
from moeless.bench.serve_load import LoadRequest, describe_error
from moeless.config.bench_serve import BenchServeConfig
from moeless.errors import DataError
from moeless.train.data import Document, load_corpus

_POOL_TOKENS = 32_768
_MAX_CHARACTERS = 8_000
"""Longer texts are cut before they are tokenized: a prompt takes what fits in the context anyway."""
_DEFAULT_REQUESTS = 1_000
_DEFAULT_OUTPUT, _DEFAULT_RANDOM_INPUT = 128, 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests in order of arrival, and where they are from."""

    requests: list[LoadRequest]
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Facts for the result file; lengths are those asked for."""
        prompts, outputs = [len(r.prompt) for r in self.requests], [r.num_output for r in self.requests]
        return {
            "source": self.source,
            "num_requests": len(self.requests),
            "last_due_s": self.requests[-1].due_s,
            "mean_prompt_tokens": float(np.mean(prompts)),
            "mean_output_tokens": float(np.mean(outputs)),
            "cut_to_context": sum(r.is_cut for r in self.requests),
        }


class TokenizeClient:
    """Token ids from the server that will be measured."""

    def __init__(self, client: httpx.Client, model: str, *, for_chat: bool = False) -> None:
        """Ask `client` for the tokens of `model`; `for_chat`, texts are parts of messages, without special tokens."""
        self._client, self._model, self._for_chat = client, model, for_chat

    def text(self, text: str) -> list[int]:
        """A text's ids. Raises `DataError` when the server refuses."""
        answer = self._post({"prompt": text[:_MAX_CHARACTERS], "add_special_tokens": not self._for_chat})
        if answer.status_code != 200:
            reason = describe_error(answer.status_code, answer.content)
            raise DataError(f"the server's /tokenize says {reason}; give rows with token_ids in --dataset-path")
        return self._ids(answer)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation's ids by the chat template; without one, or where it refuses, those of the bare contents.

        Those of the contents also when the chat endpoint will lay them out.
        """
        cut = [{**message, "content": message["content"][:_MAX_CHARACTERS]} for message in messages]
        answer = None if self._for_chat else self._post({"messages": cut})
        if answer is None or answer.status_code != 200:
            return self.text("\n\n".join(message["content"] for message in cut))
        return self._ids(answer)

    def message(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of `ids`, and the ids of a conversation that has it as its only message. Raises `DataError`."""
        answer = self._post({"tokens": list(ids)}, "/detokenize")
        if answer.status_code != 200:
            reason = describe_error(answer.status_code, answer.content)
            raise DataError(f"the server's /detokenize says {reason}; --backend openai-chat needs it")
        text: str = answer.json()["prompt"]
        answer = self._post({"messages": [{"role": "user", "content": text}]})
        if answer.status_code != 200:
            reason = describe_error(answer.status_code, answer.content)
            raise DataError(f"the server lays out no message for --backend openai-chat: /tokenize says {reason}")
        return text, self._ids(answer)

    def _post(self, body: dict[str, Any], path: str = "/tokenize") -> httpx.Response:
        try:
            return self._client.post(path, json={"model": self._model, **body})
        except httpx.HTTPError as error:
            raise DataError(f"the server's {path} failed: {error!r}") from error

    def _ids(self, answer: httpx.Response) -> list[int]:
        ids: list[int] = answer.json()["tokens"]
        return ids


def make_load(config: BenchServeConfig, client: httpx.Client, model: str, max_model_len: int) -> Load:
    """The requests that `config` asks for; the same for the same configuration, tokenizer and context length.

    Raises:
        DataError: a data set or trace that cannot be used, or a server that cannot tokenize it.
    """
    if config.backend == "openai":
        return _make_load(config, TokenizeClient(client, model), max_model_len)
    tokens = TokenizeClient(client, model, for_chat=True)
    num_around = len(tokens.message([])[1])
    if num_around >= max_model_len - 1:
        raise DataError(f"the chat template alone takes {num_around} of the {max_model_len} tokens of the context")
    load = _make_load(config, tokens, max_model_len, num_around)
    return replace(load, requests=[as_message(request, tokens, max_model_len) for request in load.requests])


def as_message(request: LoadRequest, tokens: TokenizeClient, max_model_len: int) -> LoadRequest:
    """The request for the chat endpoint: as much of its prompt's end as fits in the context as one user message.

    A text's ids may be a few more or less than those it was made of, so the prompt's length is what the server says.
    """
    ids, room = list(request.prompt), max_model_len - request.num_output
    text, prompt = tokens.message(ids)
    while len(prompt) > room and ids:
        ids = ids[len(prompt) - room :]
        text, prompt = tokens.message(ids)
    num_output = min(request.num_output, max_model_len - len(prompt))
    is_cut = request.is_cut or len(ids) < len(request.prompt) or num_output < request.num_output
    return replace(request, prompt=tuple(prompt), message=text, num_output=num_output, is_cut=is_cut)


def _make_load(config: BenchServeConfig, tokens: TokenizeClient, max_model_len: int, num_around: int = 0) -> Load:
    """The requests by token ids; given lengths are those with `num_around` further tokens of a template."""
    corpus = load_corpus(config.dataset_path)
    documents = list(corpus.documents)
    random.Random(config.seed).shuffle(documents)
    if config.trace is not None:
        trace = _of_trace(config)
        pairs = zip(trace.prompt_tokens_N.tolist(), trace.output_tokens_N.tolist(), strict=True)
        pool_P = _pool(documents, tokens)
        requests = _cut_from_pool(config, pool_P, trace.times_s_N, pairs, max_model_len, num_around, trace.blocks)
        return Load(requests=requests, source=trace.name)
    num_requests = config.num_prompts or _DEFAULT_REQUESTS
    due_s_N = due_times_s(num_requests, config.request_rate, config.burstiness or 1.0, config.seed)
    if config.dataset_name == "random":
        pool_P = np.unique(_pool(documents, tokens))
        lengths = (config.random_input_len or _DEFAULT_RANDOM_INPUT, config.random_output_len or _DEFAULT_OUTPUT)
        requests = _cut_from_pool(config, pool_P, due_s_N, [lengths] * num_requests, max_model_len, num_around)
        return Load(requests=requests, source=f"random tokens of {corpus.name}")
    encoded = [_encode(document, tokens, config.output_len) for document in documents[:num_requests]]
    requests = []
    for number, due_s in enumerate(due_s_N.tolist()):
        prompt, wanted = encoded[number % len(encoded)]
        num_prompt, num_output = fit(len(prompt), wanted, max_model_len)
        is_cut = (num_prompt, num_output) != (len(prompt), wanted)
        ids = tuple(prompt[-num_prompt:])
        requests.append(LoadRequest(due_s=due_s, prompt=ids, num_output=num_output, is_cut=is_cut))
    return Load(requests=requests, source=corpus.name)


def due_times_s(num_requests: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """When each request is due: gaps of mean 1/`rate` from a gamma distribution of shape `burstiness`, the first at 0.

    Shape 1 is a Poisson process. An infinite rate gives zeros.
    """
    if rate == math.inf:
        return np.zeros(num_requests)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), num_requests)
    return np.cumsum(gaps) - gaps[0]


def fit(num_prompt: int, num_output: int, max_model_len: int) -> tuple[int, int]:
    """Both lengths, at least 1, cut so that together they fit in the context; the prompt gives way first."""
    num_output = max(1, min(num_output, max_model_len - 1))
    return max(1, min(num_prompt, max_model_len - num_output)), num_output


def _of_trace(config: BenchServeConfig) -> Arrivals:
    """The part of the trace that was asked for, scaled."""
    assert config.trace is not None
    arrivals = read_arrivals(config.trace)
    keep = slice(0, int(np.sum(arrivals.times_s_N <= (config.max_duration_s or math.inf))))
    keep = slice(0, min(keep.stop, config.num_prompts or keep.stop))
    scale = config.length_scale or 1.0
    prompts_N, outputs_N = (
        np.maximum(1, np.rint(lengths_N[keep] * scale)).astype(np.int64)
        for lengths_N in (arrivals.prompt_tokens_N, arrivals.output_tokens_N)
    )
    return Arrivals(
        times_s_N=arrivals.times_s_N[keep] * (config.time_scale or 1.0),
        prompt_tokens_N=prompts_N,
        output_tokens_N=outputs_N,
        name=arrivals.name,
        blocks=arrivals.blocks[keep],
    )


def _cut_from_pool(
    config: BenchServeConfig,
    pool_P: NDArray[np.int64],
    due_s_N: NDArray[np.float64],
    lengths: Iterable[tuple[int, int]],
    max_model_len: int,
    num_around: int,
    blocks: Sequence[tuple[int, ...]] = (),
) -> list[LoadRequest]:
    """Prompts of given lengths: random draws from the pool, or stretches of it from random places, around its end.

    Each of a request's `blocks` is a stretch of its own, the same wherever the block's number comes again.
    """
    block_tokens = max(1, round(BLOCK_TOKENS * (config.length_scale or 1.0)))
    rng = np.random.default_rng(config.seed)
    requests = []
    for due_s, (wanted_prompt, wanted_output), shared in zip(
        due_s_N.tolist(), lengths, blocks or [()] * len(due_s_N), strict=True
    ):
        num_prompt, num_output = fit(wanted_prompt, wanted_output, max_model_len)
        is_cut = (num_prompt, num_output) != (wanted_prompt, wanted_output)
        num_ids = max(1, num_prompt - num_around)
        if config.dataset_name == "random":
            ids = rng.choice(pool_P, num_ids)
        else:
            needed = shared[: math.ceil(num_ids / block_tokens)]
            parts = [_stretch(pool_P, np.random.default_rng([config.seed, n]), block_tokens) for n in needed]
            rest = _stretch(pool_P, rng, max(0, num_ids - block_tokens * len(needed)))
            ids = np.concatenate([*parts, rest])[:num_ids]
        prompt = tuple(ids.tolist())
        requests.append(LoadRequest(due_s=due_s, prompt=prompt, num_output=num_output, is_cut=is_cut))
    return requests


def _stretch(pool_P: NDArray[np.int64], rng: np.random.Generator, num_ids: int) -> NDArray[np.int64]:
    """So many ids of the pool from a random place on, around its end."""
    return pool_P[(rng.integers(len(pool_P)) + np.arange(num_ids)) % len(pool_P)]


def _pool(documents: list[Document], tokens: TokenizeClient) -> NDArray[np.int64]:
    ids: list[int] = []
    for document in documents:
        ids += _whole(document, tokens)
        if len(ids) >= _POOL_TOKENS:
            break
    return np.array(ids, np.int64)


def _whole(document: Document, tokens: TokenizeClient) -> list[int]:
    if document.token_ids is not None:
        return document.token_ids
    if document.messages is None:
        return tokens.text(document.text or "")
    return tokens.text("\n\n".join(message["content"] for message in document.messages))


def _encode(document: Document, tokens: TokenizeClient, output_len: int | None) -> tuple[list[int], int]:
    """The ids of a document up to the first answer, and how many tokens to ask for."""
    messages = document.messages
    if messages is None:
        return _whole(document, tokens), output_len or _DEFAULT_OUTPUT
    answer = next((i for i, message in enumerate(messages) if i and message["role"] == "assistant"), None)
    prompt = tokens.chat(messages[:answer])
    if output_len is None and answer is not None:
        output_len = len(tokens.text(messages[answer]["content"]))
    return prompt, output_len or _DEFAULT_OUTPUT
