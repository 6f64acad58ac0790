"""From token ids to text, one token at a time: whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of a growing list of tokens.

    A token is decoded together with those before it, as tokenizers add or drop spaces by context, and text that ends
    inside a character is held back until the character is whole.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tokens: list[int] = []
        self._context = 0
        """Where decoding starts: text from here to `_emitted` gives the next token its context."""
        self._emitted = 0
        """Tokens whose text has been given out."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty inside a character."""
        self._tokens.append(token)
        before, text = self._decode(self._context, self._emitted), self._decode(self._context, len(self._tokens))
        if len(text) <= len(before) or text.endswith(_INCOMPLETE):
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return text[len(before) :]

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all `tokens` at once: what pieces and `finish` join to."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip_special_tokens))

    def finish(self) -> str:
        """What was held back, an incomplete character included."""
        before, text = self._decode(self._context, self._emitted), self._decode(self._context, len(self._tokens))
        self._context = self._emitted = len(self._tokens)
        return text[len(before) :]

    def _decode(self, first: int, end: int) -> str:
        ids = self._tokens[first:end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""


def find_stop(text: str, num_new: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first in `text`, whose last `num_new` characters are new, and where it starts."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    if not found:
        return None
    _, start, stop = min(found)
    return stop, start
