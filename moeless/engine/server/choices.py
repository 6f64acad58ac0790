"""What chat and text completions share: assembling choices from tokens, and counting what was used."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from moeless.engine.messages import Progress
from moeless.engine.request import SamplingParams, TokenLogprobs
from moeless.engine.server.assembly import Assembly, Piece
from moeless.engine.server.errors import ApiError
from moeless.engine.server.schemas import StreamOptions
from moeless.engine.server.service import Service, usage

Tokens = AsyncIterator[tuple[int, Progress]]


class Answer:
    """The choices of one request on their way."""

    def __init__(
        self,
        service: Service,
        answer_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        options: StreamOptions | None,
    ) -> None:
        assert service.prompts is not None, "a request is taken in only after loading"
        self.service, self.id = service, answer_id
        self.tokenizer = service.prompts.tokenizer
        self.wants_usage = options is not None and bool(options.include_usage)
        self._wants_running_usage = options is not None and bool(options.continuous_usage_stats)
        self._wants_routes = params.return_routed_experts
        self._num_prompt_tokens = sum(map(len, prompts))
        self._assemblies = [Assembly(self.tokenizer, params) for _ in range(len(prompts) * params.n)]
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None] | None] = [None] * len(self._assemblies)
        """Of each choice, once known and if asked for."""

    async def pieces(self, tokens: Tokens) -> AsyncIterator[tuple[int, Piece]]:
        """Each token's piece, with the choice it is of."""
        async for choice, progress in tokens:
            if progress.prompt_logprobs is not None:
                self.prompt_logprobs[choice] = progress.prompt_logprobs
            yield choice, self._assemblies[choice].push(progress)

    async def collect(self, tokens: Tokens) -> list[list[Piece]]:
        """All pieces of each choice. Raises `ApiError` 500 when a choice could not be completed."""
        choices: list[list[Piece]] = [[] for _ in self._assemblies]
        async for choice, piece in self.pieces(tokens):
            choices[choice].append(piece)
            if piece.finish_reason == "error":
                raise lost()
        return choices

    def routes(self, piece: Piece) -> dict[str, str | None]:
        """What a choice has at its end of the experts of its tokens, if that was asked for: an .npy file in base64."""
        if piece.finish_reason is None or not self._wants_routes:
            return {}
        content = piece.routed_experts
        return {"routed_experts": None if content is None else b64encode(content).decode()}

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        return usage(self._num_prompt_tokens, sum(assembly.num_tokens for assembly in self._assemblies))

    def running_usage(self) -> dict[str, Any]:
        """The usage key of an event that is not the last, if it is to have one."""
        if self._wants_running_usage:
            return {"usage": self.usage()}
        return {"usage": None} if self.wants_usage else {}


def lost() -> ApiError:
    """The error of a completion that the engine could not finish."""
    return ApiError(500, "the engine could not finish this completion", code="engine_error")


def json_response(value: dict[str, Any] | None) -> Response:
    """A whole answer; for a client that has gone, one that nobody reads."""
    if value is None:
        return Response(status_code=499)
    return Response(msgspec.json.encode(value), media_type="application/json")
