"""Log-probabilities in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moeless.engine.request import Logprob, TokenLogprobs

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has not."""


def chat_logprob(tokenizer: Any, token: int, logprobs: TokenLogprobs, num_top: int) -> dict[str, Any]:
    """An item of a chat choice's `logprobs.content`."""
    likeliest = sorted(logprobs.items(), key=lambda item: item[1].rank)[:num_top]
    top = [_item(tokenizer, other, logprob) for other, logprob in likeliest]
    return {**_item(tokenizer, token, logprobs[token]), "top_logprobs": top}


class CompletionLogprobs:
    """The `logprobs` of a text completion, token by token; offsets go on over prompt and output."""

    def __init__(self, tokenizer: Any, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._offset = 0

    def take(self, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """The next tokens' part; None for a token that nothing comes before."""
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in tokens:
            text = token_text(self._tokenizer, token)
            part["tokens"].append(text)
            part["text_offset"].append(self._offset)
            self._offset += len(text)
            part["token_logprobs"].append(None if logprobs is None else _finite(logprobs[token]))
            part["top_logprobs"].append(None if logprobs is None else self._top(token, logprobs))
        return part

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest by text, the chosen one among them; of two with the same text, the likelier."""
        top: dict[str, float] = {}
        for other, logprob in sorted(logprobs.items(), key=lambda item: item[1].rank):
            if logprob.rank <= self._num_top or other == token:
                top.setdefault(token_text(self._tokenizer, other), _finite(logprob))
        return top


def token_text(tokenizer: Any, token: int) -> str:
    """How a token is written; `token_id:N` without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token}"
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return text


def _item(tokenizer: Any, token: int, logprob: Logprob) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", errors="replace"))}


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)
