"""What a front end and its ranks say to each other: msgpack with a tag a message, checked on arrival."""

from __future__ import annotations

from typing import Any

import msgspec

from moeless.engine.engine import ModelFacts
from moeless.engine.request import CompletionOutput, FinishReason, TokenLogprobs
from moeless.engine.submission import Submission


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all."""


class Numbered(Message, frozen=True):
    """A message to one rank that the others must know of: they get a `Wake` of the same number.

    Numbers ascend by one; see `Control.heard`.
    """

    number: int


class Submit(Numbered, frozen=True):
    """Run a completion."""

    submission: Submission


class Abort(Numbered, frozen=True):
    """Drop a request; goes to all ranks."""

    request_id: str


class Wake(Numbered, frozen=True):
    """Something was sent to another rank."""


class Stop(Numbered, frozen=True):
    """End the process; goes to all ranks."""


class AskStatistics(Message, frozen=True):
    """Answer with `Statistics`; doesn't wake the group."""


class Ready(Message, frozen=True):
    """The rank has loaded the model and waits for work."""

    facts: ModelFacts


class Progress(msgspec.Struct, frozen=True):
    """A completion's new token, and its end."""

    request_id: str
    index: int
    token: int | None
    """None: it ended without a token."""
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    output: CompletionOutput | None = None
    """The whole completion, when it has ended."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With `output`, if they were asked for."""


class Advanced(Message, frozen=True):
    """What one step brought."""

    progress: list[Progress]


class Statistics(Message, frozen=True):
    """See `Engine.statistics`."""

    values: dict[str, Any]


class Failed(Message, frozen=True):
    """The rank can't go on and ends; `error` is the name of a class in `moeless.errors`, or empty for a bug."""

    error: str
    message: str


ToRank = Submit | Abort | Wake | Stop | AskStatistics
ToFront = Ready | Advanced | Statistics | Failed
