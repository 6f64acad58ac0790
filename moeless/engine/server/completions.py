"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moeless.engine.request import TokenLogprobs
from moeless.engine.server.assembly import Piece
from moeless.engine.server.choices import Answer, Tokens, json_response, lost
from moeless.engine.server.logprobs import CompletionLogprobs
from moeless.engine.server.sampling import refuse_unimplemented, sampling_params
from moeless.engine.server.schemas import CompletionBody
from moeless.engine.server.service import Service, new_id, now_s
from moeless.engine.server.sse import EventStream, while_connected


async def answer_completion(service: Service, request: Request, body: CompletionBody) -> Response:
    """The whole answer, or a stream of it.

    Raises:
        ApiError: the request can't be run.
    """
    prompts, facts = service.require_ready(body.model)
    refuse_unimplemented(body)
    params = sampling_params(body, facts.sampling_defaults, facts.vocab_size)
    ids = await prompts.of_completion(body)
    texts = [await prompts.decode(one) for one in ids] if body.echo else [""] * len(ids)
    answer = Answer(service, new_id("cmpl"), ids, params, body.stream_options)
    tokens, stack = service.start(answer.id, ids, params, "prompt")
    prefixes = [_Prefix(one, text) for one, text in zip(ids, texts, strict=True) for _ in range(params.n)]
    shape = _CompletionShape(answer, body, prefixes)
    if body.stream:
        return EventStream(shape.events(tokens), stack.close, service.config.sse_keep_alive)
    with stack:
        return json_response(await while_connected(request, shape.whole(tokens)))


class _Prefix:
    """What an echo puts in front of a choice."""

    def __init__(self, ids: list[int], text: str) -> None:
        self.ids, self.text = ids, text


class _CompletionShape:
    """How text completions look."""

    def __init__(self, answer: Answer, body: CompletionBody, prefixes: Sequence[_Prefix]) -> None:
        self._answer, self._prefixes, self._echo = answer, prefixes, bool(body.echo)
        self._created_s = now_s()
        self._logprobs = [
            None if body.logprobs is None else CompletionLogprobs(answer.tokenizer, body.logprobs) for _ in prefixes
        ]

    async def whole(self, tokens: Tokens) -> dict[str, Any]:
        """The answer in one piece."""
        pieces = await self._answer.collect(tokens)
        choices = [
            {
                "index": index,
                "text": self._prefixes[index].text + "".join(piece.text for piece in choice),
                "logprobs": self._take_logprobs(index, choice, is_first=True),
                "finish_reason": choice[-1].finish_reason,
                "stop_reason": choice[-1].stop_reason,
                **self._answer.routes(choice[-1]),
            }
            for index, choice in enumerate(pieces)
        ]
        return {**self._head(), "choices": choices, "usage": self._answer.usage()}

    async def events(self, tokens: Tokens) -> AsyncIterator[dict[str, Any]]:
        """One event a token; an echo comes with the first."""
        begun: set[int] = set()
        async for index, piece in self._answer.pieces(tokens):
            is_first = index not in begun
            begun.add(index)
            choice = {
                "index": index,
                "text": self._prefixes[index].text * is_first + piece.text,
                "logprobs": self._take_logprobs(index, [piece], is_first),
                "finish_reason": piece.finish_reason,
                "stop_reason": piece.stop_reason,
                **self._answer.routes(piece),
            }
            yield {**self._head(), "choices": [choice], **self._answer.running_usage()}
            if piece.finish_reason == "error":
                raise lost()
        if self._answer.wants_usage:
            yield {**self._head(), "choices": [], "usage": self._answer.usage()}

    def _head(self) -> dict[str, Any]:
        answer = self._answer
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": self._created_s,
            "model": answer.service.model_name,
        }

    def _take_logprobs(self, index: int, pieces: Sequence[Piece], is_first: bool) -> dict[str, Any] | None:
        logprobs = self._logprobs[index]
        if logprobs is None:
            return None
        items: list[tuple[int, TokenLogprobs | None]] = []
        if is_first and self._echo:
            scores = self._answer.prompt_logprobs[index] or ()
            items += zip(self._prefixes[index].ids, scores, strict=True)
        items += [(piece.token, piece.logprobs) for piece in pieces if piece.token is not None]
        return logprobs.take(items)
