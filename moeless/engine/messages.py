"""What a front end and its ranks say to each other: msgpack with a tag a message, checked on arrival."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moeless.engine.facts import ModelFacts
from moeless.engine.request import CompletionOutput, FinishReason, TokenLogprobs
from moeless.engine.submission import Submission
from moeless.policy.cost import CostModel


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


class Form(Message, frozen=True):
    """Leave the group there is, together with its other ranks if they still answer, and be a rank of the next one.

    Everything sent before is for the group before: what it ran is forgotten here, and sent again by the front end.
    """

    generation: int
    rank: int | None
    """None: be no rank any more; the process ends."""
    size: int
    cost: CostModel | None = None
    """What plans are priced with, once a group has measured it."""


class AskStatistics(Message, frozen=True):
    """Answer with `Statistics`; doesn't wake the group."""


class Record(Message, frozen=True):
    """Start, stop or write the record of where tokens go; for one rank, answered with `Recorded`; wakes nobody."""

    action: Literal["start", "stop", "dump"]
    budget_bytes: float = 0.0
    path: str = ""


class Loaded(Message, frozen=True):
    """The process has loaded the model and waits for a group to join."""

    facts: ModelFacts


class Formed(Message, frozen=True):
    """The rank has joined its group and takes work; all it sends from here on is of this generation."""

    generation: int
    cost: CostModel | None


class Broken(Message, frozen=True):
    """The group does not work, as far as this rank can see; it has kept the model and waits for the next `Form`."""

    generation: int
    error: str
    """Name of a class in `moeless.errors`; another than `RankError` tells that the group could not be formed at all."""
    message: str


class Pulse(Message, frozen=True):
    """The process runs; sent by a thread of its own, whatever the rank is at."""

    is_waiting: bool
    """Whether the rank waits for other ranks."""


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
    """With the first token and with `output`, if they were asked for."""
    routed_experts: bytes | None = None
    """With `output`, if they were asked for: an .npy file."""
    queue_s: float | None = None
    """With the first token: seconds from arrival at the rank to the first step that had some of the prompt."""


class Advanced(Message, frozen=True):
    """What one step brought."""

    progress: list[Progress]
    num_tokens: int = 0
    """Tokens the step ran on this rank."""


class Statistics(Message, frozen=True):
    """See `Engine.statistics` and `Traffic.report`."""

    values: dict[str, Any]
    traffic: dict[str, Any] | None = None
    """From rank 0 only: the others see the same."""


class Recorded(Message, frozen=True):
    """What came of a `Record`: the steps that the ring holds, or that were recorded or written."""

    num_steps: int
    error: str = ""
    """Why it could not be done."""


class Failed(Message, frozen=True):
    """The rank can't go on and ends; `error` is the name of a class in `moeless.errors`, or empty for a bug."""

    error: str
    message: str


ToRank = Submit | Abort | Wake | Stop | Form | AskStatistics | Record
ToFront = Loaded | Formed | Broken | Pulse | Advanced | Statistics | Recorded | Failed
