"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moeless.engine.request import SamplingParams
from moeless.engine.server.assembly import Piece
from moeless.engine.server.choices import Answer, json_response, lost
from moeless.engine.server.logprobs import chat_logprob
from moeless.engine.server.sampling import refuse_unimplemented, sampling_params
from moeless.engine.server.schemas import ChatBody
from moeless.engine.server.service import Service, new_id, now_s
from moeless.engine.server.sse import EventStream, while_connected


async def answer_chat(service: Service, request: Request, body: ChatBody) -> Response:
    """The whole answer, or a stream of it.

    Raises:
        ApiError: the request can't be run.
    """
    prompts, facts = service.require_ready(body.model)
    refuse_unimplemented(body)
    params = sampling_params(body, facts.sampling_defaults, facts.vocab_size)
    ids = await prompts.of_chat(body)
    answer = Answer(service, new_id("chatcmpl"), [ids], params, body.stream_options)
    tokens, stack = service.start(answer.id, [ids], params, "messages")
    shape = _ChatShape(answer, body, params)
    if body.stream:
        return EventStream(shape.events(tokens), stack.close, service.config.sse_keep_alive)
    with stack:
        return json_response(await while_connected(request, shape.whole(tokens)))


class _ChatShape:
    """How chat answers look."""

    def __init__(self, answer: Answer, body: ChatBody, params: SamplingParams) -> None:
        self._answer, self._params, self._num_top = answer, params, body.top_logprobs or 0
        self._created_s = now_s()

    async def whole(self, tokens: AsyncIterator[tuple[int, Any]]) -> dict[str, Any]:
        """The answer in one piece."""
        pieces = await self._answer.collect(tokens)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(piece.text for piece in choice)},
                "logprobs": self._logprobs(choice),
                "finish_reason": choice[-1].finish_reason,
                "stop_reason": choice[-1].stop_reason,
                **self._answer.routes(choice[-1]),
            }
            for index, choice in enumerate(pieces)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._answer.usage()}

    async def events(self, tokens: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any]]:
        """One event a token; the first of a choice is preceded by its role."""
        head = self._head("chat.completion.chunk")
        begun: set[int] = set()
        async for index, piece in self._answer.pieces(tokens):
            if index not in begun:
                begun.add(index)
                role = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
                yield {**head, "choices": [first], **self._answer.running_usage()}
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"content": piece.text},
                "logprobs": self._logprobs([piece]),
                "finish_reason": piece.finish_reason,
                **self._answer.routes(piece),
            }
            if piece.finish_reason is not None:
                choice["stop_reason"] = piece.stop_reason
            yield {**head, "choices": [choice], **self._answer.running_usage()}
            if piece.finish_reason == "error":
                raise lost()
        if self._answer.wants_usage:
            yield {**head, "choices": [], "usage": self._answer.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        answer = self._answer
        return {"id": answer.id, "object": kind, "created": self._created_s, "model": answer.service.model_name}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._params.logprobs is None:
            return None
        tokenizer = self._answer.tokenizer
        content = [
            chat_logprob(tokenizer, piece.token, piece.logprobs, self._num_top)
            for piece in pieces
            if piece.token is not None and piece.logprobs is not None
        ]
        return {"content": content}
