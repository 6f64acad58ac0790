"""What all endpoints work with: the front, the prompts, and the rules for taking a request in."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from moeless.config.serve import ServeConfig
from moeless.engine.facts import ModelFacts
from moeless.engine.front import Front
from moeless.engine.messages import Progress
from moeless.engine.prometheus import ServiceMetrics
from moeless.engine.request import SamplingParams
from moeless.engine.server.errors import ApiError
from moeless.engine.server.prompts import Prompts
from moeless.engine.server.sampling import usage_error
from moeless.engine.submission import Submission, check_routed_experts, check_submission
from moeless.errors import CapacityError, UsageError

_GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
_LOADING_RETRY_S, _DRAINING_RETRY_S, _QUEUE_RETRY_S = 5, 30, 1


@dataclass(slots=True, kw_only=True, eq=False)
class Service:
    """See the module's head."""

    config: ServeConfig
    front: Front
    metrics: ServiceMetrics
    prompts: Prompts | None = None
    """None while the model is being loaded."""
    created_s: int = 0

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.config.model_names[0]

    def require_ready(self, model: str | None) -> tuple[Prompts, ModelFacts]:
        """Raises `ApiError`: 503 when no request can be taken in, 404 for an unknown model."""
        state, facts = self.front.state, self.front.facts
        reasons = {
            "loading": ("the model is being loaded", "loading", _LOADING_RETRY_S),
            "draining": ("the server is shutting down", "draining", _DRAINING_RETRY_S),
            "failed": ("the engine is dead", "engine_dead", _DRAINING_RETRY_S),
        }
        if state in reasons or self.prompts is None or facts is None:
            message, code, retry_after_s = reasons.get(state, reasons["loading"])
            self.metrics.reject(code)
            raise ApiError(503, message, code=code, retry_after_s=retry_after_s)
        self.require_model(model)
        return self.prompts, facts

    def refusal(self, path: str) -> ApiError | None:
        """503 for a request that there is no room for, whatever it asks: cheaper than to parse it first."""
        front = self.front
        if path not in _GENERATION_PATHS or front.ledger.num_live < front.capacity:
            return None
        self.metrics.reject("queue_full")
        return _queue_full(f"the queue is full: {front.ledger.num_live} completions run or wait")

    def require_model(self, model: str | None) -> None:
        """Raises `ApiError` 404 for a model that is not served here; no name means the one that is."""
        if model is not None and model not in self.config.model_names:
            message = f"the model {model[:200]!r} does not exist; served here: {', '.join(self.config.model_names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def start(
        self, request_id: str, prompts: Sequence[list[int]], params: SamplingParams, param: str
    ) -> tuple[AsyncIterator[tuple[int, Progress]], ExitStack]:
        """Run `params.n` completions of each prompt.

        Returns:
            Their tokens as they come, with the choice they are of: completion j of prompt p is choice p * n + j. And
            what to close when no more are wanted.

        Raises:
            ApiError: 400 for a request that can't be run, naming `param`; 503 when the queue is full.
        """
        facts = self.front.facts
        assert facts is not None, "require_ready comes first"
        for prompt in prompts:
            self._check(facts, prompt, params, param)
        try:
            check_routed_experts(prompts, params, facts)
        except UsageError as error:
            raise usage_error(error) from None
        submissions = [
            Submission(request_id=f"{request_id}.{p}", index=j, prompt=prompt, params=params, seed=seed)
            for p, prompt in enumerate(prompts)
            for seed in [secrets.randbits(63) if params.seed is None else params.seed]
            for j in range(params.n)
        ]
        if len(submissions) > self.front.capacity:
            message = f"{len(submissions)} completions are more than the server takes at once, {self.front.capacity}"
            raise ApiError(400, message, param="n" if params.n > 1 else param)
        stack = ExitStack()
        try:
            tokens = stack.enter_context(self.front.running(submissions))
        except CapacityError as error:
            raise _queue_full(str(error)) from None
        choices = {(s.request_id, s.index): choice for choice, s in enumerate(submissions)}
        return _by_choice(tokens, choices), stack

    def _check(self, facts: ModelFacts, prompt: list[int], params: SamplingParams, param: str) -> None:
        try:
            check_submission(
                prompt,
                params,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                has_tokenizer=self.prompts is not None and self.prompts.tokenizer is not None,
            )
        except UsageError as error:
            if "maximum context length" in str(error):
                raise ApiError(400, str(error), param=param, code="context_length_exceeded") from None
            converted = usage_error(error)
            converted.param = converted.param or param
            raise converted from None


def _queue_full(message: str) -> ApiError:
    return ApiError(503, message, kind="overloaded_error", code="queue_full", retry_after_s=_QUEUE_RETRY_S)


async def _by_choice(
    tokens: AsyncIterator[Progress], choices: dict[tuple[str, int], int]
) -> AsyncIterator[tuple[int, Progress]]:
    async for progress in tokens:
        yield choices[progress.request_id, progress.index], progress


def new_id(prefix: str) -> str:
    """An id for an answer, never used before."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now_s() -> int:
    """Unix time, as `created` has it."""
    return int(time.time())


def usage(num_prompt: int, num_output: int) -> dict[str, int]:
    """The `usage` of an answer, in tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
