"""What a client asks for and what it gets. Plain data: nothing here loads torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeless.errors import CheckpointError, UsageError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen. Names and defaults are vLLM's; temperature 0 is greedy."""

    n: int = 1
    """Completions of each prompt, sampled independently."""
    max_tokens: int | None = 16
    """None: up to the context length."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """Tokens depend on the seed and on nothing else in the batch; None: drawn at random."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens (and of the chosen one) at each position."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    return_routed_experts: bool = False
    """Tell which experts each token went to (`CompletionOutput.routed_experts`)."""

    def __post_init__(self) -> None:
        _require("n", self.n, 1)
        if self.max_tokens is not None:
            _require("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise UsageError(f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}")
        _require("min_tokens", self.min_tokens, 0)
        _require("temperature", self.temperature, 0)
        _require("top_k", self.top_k, -1)
        _require("min_p", self.min_p, 0, 1)
        _require("presence_penalty", self.presence_penalty, -2, 2)
        _require("frequency_penalty", self.frequency_penalty, -2, 2)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise UsageError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        if any(not math.isfinite(bias) for bias in (self.logit_bias or {}).values()):
            raise UsageError("logit_bias must be finite")
        if any(not text for text in self.stop_strings):
            raise UsageError("stop must not have an empty string")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `UsageError` when a token id is outside the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids or ())):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise UsageError(f"{name} has token id {token}, the vocabulary has 0 to {vocab_size - 1}")


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """Parameters that a checkpoint sets for requests that do not. Raises `CheckpointError` for ones nobody may have."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(generation_config, name, None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**given)
    except (UsageError, TypeError) as error:
        raise CheckpointError(f"generation_config.json cannot be used: {error}") from error
    return given


def _require(name: str, value: float, minimum: float, maximum: float = math.inf) -> None:
    if not (minimum <= value <= maximum and math.isfinite(value)):  # NaN fails the comparison
        bound = f"at least {minimum}" if maximum == math.inf else f"between {minimum} and {maximum}"
        raise UsageError(f"{name} must be {bound}, got {value}")


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model itself (before penalties and temperature) and its rank from 1."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of a request's `n` completions."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    """The stop token or string that ended it; None for the end-of-text token."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    routed_experts: NDArray[np.unsignedinteger] | None = field(default=None, compare=False)
    """Expert ids [tokens, MoE layers, experts a token] of the prompt and of the output but its last token, which is
    never run; None unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a request came to."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry a prompt token; the first is None, as nothing comes before it."""
