"""From a completion's tokens to the pieces of text that may be sent, the same for streams and whole answers.

Text that ends inside a character is held back until the character is whole, and text that may turn out to be the
beginning of a stop string until it is known not to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeless.engine.messages import Progress
from moeless.engine.request import FinishReason, SamplingParams, TokenLogprobs
from moeless.engine.text import TextStream, find_stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one token adds: maybe no text yet, maybe the end."""

    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    routed_experts: bytes | None


class Assembly:
    """One completion's text so far."""

    def __init__(self, tokenizer: Any | None, params: SamplingParams) -> None:
        skip = params.skip_special_tokens
        self._stream = None if tokenizer is None else TextStream(tokenizer, skip_special_tokens=skip)
        self._params = params
        self._text = ""
        self._num_sent = 0
        self.num_tokens = 0

    def push(self, progress: Progress) -> Piece:
        """Take the next token, or the end, or both."""
        self.num_tokens += progress.token is not None
        stop_reason = progress.output.stop_reason if progress.output is not None else None
        is_stop_token = progress.finish_reason == "stop" and not isinstance(stop_reason, str)
        shows_token = not is_stop_token or self._params.include_stop_str_in_output
        new = self._stream.push(progress.token) if self._stream and progress.token is not None and shows_token else ""
        self._text += new
        end = len(self._text)
        if isinstance(stop_reason, str):
            found = find_stop(self._text, len(new), self._params.stop_strings)
            if found is not None:
                stop, start = found
                end = start + len(stop) * self._params.include_stop_str_in_output
        elif progress.finish_reason is not None:
            self._text += self._stream.finish() if self._stream else ""
            end = len(self._text)
        else:
            end -= _held_back(self._text, self._params.stop_strings)
        text, self._num_sent = self._text[self._num_sent : end], max(self._num_sent, end)
        return Piece(
            text=text,
            token=progress.token,
            logprobs=progress.logprobs,
            finish_reason=progress.finish_reason,
            stop_reason=stop_reason,
            routed_experts=progress.routed_experts,
        )


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
