"""One completion on its way: the prompt, the tokens so far, and what of them is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.engine.request import CompletionOutput, FinishReason, SamplingParams, TokenLogprobs
from moeless.engine.text import TextStream, find_stop


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one of a request's completions on the rank that runs it.

    The tokens are the truth; keys, values and everything else can be computed again from them.
    """

    sequence_id: int
    """Unique on its rank and ascending in the order of arrival, which is the order of precedence."""
    request_id: str
    index: int
    params: SamplingParams
    prompt: tuple[int, ...]
    max_tokens: int
    """Tokens to make at most, the context length taken into account."""
    seed: int
    eos_ids: frozenset[int]
    text_stream: TextStream | None
    """None: the checkpoint has no tokenizer."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_preemptions: int = 0
    arrived_s: float = 0.0
    """When it came to its rank, by that rank's clock."""
    started_s: float = 0.0
    """When its first step began; 0 before."""
    routes_TLK: NDArray[np.unsignedinteger] | None = None
    """Experts of the computed tokens (see `routed_experts`), with room for all; only if asked for."""
    token_counts: Any = None
    """The sampler's [2, V] counts of prompt and output tokens; only under penalties."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt)
        if self.text_stream is not None and self.params.stop_strings:
            self.text = "".join(map(self.text_stream.push, self.tokens[len(self.prompt) :]))

    @property
    def num_output(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_uncomputed(self) -> int:
        """Tokens the model has yet to see: 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be scored."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    def forget(self) -> None:
        """Start again: nothing is computed."""
        self.num_computed, self.routes_TLK = 0, None

    def append(self, token: int) -> None:
        """Take a sampled token, and finish where the request says so."""
        self.tokens.append(token)
        params = self.params
        if self.text_stream is not None and params.stop_strings:
            self._append_text(self.text_stream.push(token))
        if self.finish_reason is not None or self.num_output < params.min_tokens:
            pass
        elif token in self.eos_ids and not params.ignore_eos:
            self.finish_reason = "stop"
        elif token in (params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token
        if self.finish_reason is None and self.num_output >= self.max_tokens:
            self.finish_reason = "length"

    def _append_text(self, new: str) -> None:
        self.text += new
        found = find_stop(self.text, len(new), self.params.stop_strings) if new else None
        if found is not None and self.num_output >= self.params.min_tokens:
            stop, start = found
            self.text = self.text[: start + len(stop) * self.params.include_stop_str_in_output]
            self.finish_reason, self.stop_reason = "stop", stop

    def output(self) -> CompletionOutput:
        """The completion so far; call it once, when it has finished, for its text to be whole."""
        if self.text_stream is not None and not isinstance(self.stop_reason, str):
            if self.params.stop_strings:
                self.text += self.text_stream.finish()
            else:
                self.text = self.text_stream.whole(self.tokens[len(self.prompt) :])
        return CompletionOutput(
            index=self.index,
            token_ids=tuple(self.tokens[len(self.prompt) :]),
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
        )
