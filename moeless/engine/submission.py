"""A completion on its way from a front end to the rank that will run it, and the checks it passes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moeless.engine.facts import ModelFacts
from moeless.engine.request import SamplingParams
from moeless.engine.routed_experts import MAX_BYTES, id_type
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


def check_routed_experts(prompts: Sequence[Sequence[int]], params: SamplingParams, facts: ModelFacts) -> None:
    """Raises `UsageError` when a request asks for experts that can't be told, or for too many of them."""
    if not params.return_routed_experts:
        return
    if facts.top_k is None:
        raise UsageError("return_routed_experts: the checkpoint does not say how many experts a token has")
    num_tokens = sum(
        len(prompt)
        + max(0, (facts.max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens) - 1)
        for prompt in prompts
    )
    size = params.n * num_tokens * facts.num_moe_layers * facts.top_k * id_type(facts.num_experts).itemsize
    if size > MAX_BYTES:
        raise UsageError(
            f"return_routed_experts would take up to {size:,} bytes ({params.n * num_tokens:,} tokens x "
            f"{facts.num_moe_layers} layers x {facts.top_k} experts), the most is {MAX_BYTES:,}; lower max_tokens or n"
        )
