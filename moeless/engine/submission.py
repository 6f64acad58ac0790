"""A completion on its way from a front end to the rank that will run it, and the checks it passes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moeless.engine.request import SamplingParams
from moeless.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One of a request's `n` completions. The same submission gives the same tokens on any rank."""

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    made: list[int] = field(default_factory=list)
    """Tokens made so far elsewhere; the completion goes on behind them."""


def check_submission(
    prompt: Sequence[int], params: SamplingParams, *, max_model_len: int, vocab_size: int, has_tokenizer: bool
) -> None:
    """Raises `UsageError` when a request can't be run, naming the value and the bound."""
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token")
    wanted = params.max_tokens or 0
    if len(prompt) + wanted > max_model_len or (params.max_tokens is None and len(prompt) == max_model_len):
        raise UsageError(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {len(prompt)} "
            f"tokens and {wanted or 'at least one'} more were requested"
        )
    bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise UsageError(f"the prompt has token id {bad}, the vocabulary has 0 to {vocab_size - 1}")
    params.check_vocabulary(vocab_size)
    if params.stop_strings and not has_tokenizer:
        raise UsageError("stop strings need a tokenizer, and the checkpoint has none; give --tokenizer")
