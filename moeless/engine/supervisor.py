"""The team of rank processes as an event loop sees it: watched, and kept a group.

Processes come and go, and every change of who is there makes a new group of those that are. Survivors of a loss keep
their weights and form the next group at once; a replacement joins when it has loaded the model, which makes one more
group. The requests are in the ledger, not here.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from moeless.config.serve import ServeConfig
from moeless.engine.crew import Crew, Lost
from moeless.engine.facts import ModelFacts
from moeless.engine.hosts import HostList
from moeless.engine.launch import error_of
from moeless.engine.messages import (
    Abort,
    AskStatistics,
    Broken,
    Failed,
    Formed,
    Loaded,
    Numbered,
    Pulse,
    Submit,
    ToFront,
    ToRank,
)
from moeless.engine.roster import Member, Reason, wanted
from moeless.engine.submission import Submission
from moeless.errors import RankError
from moeless.policy.cost import CostModel

_POLL_S = 0.05
_ASK_S = 1.0
"""How often ranks are asked for their statistics, so that idle ones speak too."""
_MAX_UNEXPLAINED = 3
"""Groups in a row that may break without the loss of a rank."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A group of `size` was told to form; it takes messages, but what ran in the one before is forgotten."""

    size: int
    is_after_loss: bool
    """Whether the one before worked until it broke; of one that never formed no request can be the cause."""


@dataclass(frozen=True, slots=True)
class Working:
    """All ranks have joined the group. `pause_s` is the time since a loss was noticed, if there was one."""

    size: int
    pause_s: float | None


Event = Lost | Regrouped | Working


class RankTeam:
    """See the module's head. To be made and used in one event loop.

    Attributes:
        facts: known once a rank has loaded the model.
    """

    def __init__(self, config: ServeConfig, hosts: HostList | None = None) -> None:
        """Nothing starts before the first `turn`."""
        self.facts: ModelFacts | None = None
        self._crew = Crew(config, hosts)
        self._processes, self._members = self._crew.processes, self._crew.members
        self._inbox: asyncio.Queue[tuple[int, int, ToFront]] = asyncio.Queue()
        self._events: list[Event] = []
        self._failed: list[tuple[Member, Failed]] = []
        self._cost: CostModel | None = None
        self._broken_s: float | None = None
        """When the present group, or one before it since which none has worked, was found to be broken."""
        self._is_broken = self._has_lost = self._has_formed = False
        """Whether the present group is broken, whether by a rank that is known to be gone, and whether it worked."""
        self._num_unexplained, self._has_worked = 0, False
        self._unfit_size, self._unfit = 0, Failed("", "")
        """The largest group that could not be formed for its size, and why."""
        self._asked_s, self._turned_s = 0.0, time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._processes.channel.fileno(), self._drain)
        self._is_open = True

    @property
    def target(self) -> int:
        """How many ranks there should be."""
        return self._crew.target

    @property
    def size(self) -> int:
        """Ranks of the present group."""
        return len(self._processes.ranks)

    @property
    def num_joined(self) -> int:
        """Ranks that work."""
        return 0 if self._is_broken else sum(m.state == "joined" for m in self._members.values())

    @property
    def num_joining(self) -> int:
        """Processes that are to be ranks, but are not yet."""
        return sum(m.state != "leaving" for m in self._members.values()) - self.num_joined

    @property
    def is_working(self) -> bool:
        """Whether there is a group that all its ranks have joined."""
        return 0 < self.num_joined == self.size

    @property
    def is_recovering(self) -> bool:
        """Whether no group has worked since the last loss."""
        return self._broken_s is not None

    def silence_s(self) -> float:
        """Seconds since the quietest rank's last word, or since the group was found to be broken."""
        heard_s = [self._members[n].heard_s for n in self._processes.ranks if n in self._members]
        return time.monotonic() - (min(heard_s, default=self._turned_s) if self._broken_s is None else self._broken_s)

    def scale(self, target: int) -> None:
        """Have another number of ranks from now on. Raises `CapacityError` when other hosts have no room for them."""
        self._crew.scale(target)

    async def receive(self) -> tuple[int, ToFront] | None:
        """The next message of a rank of the present group, or None after a moment."""
        try:
            generation, rank, message = await asyncio.wait_for(self._inbox.get(), _POLL_S)
        except TimeoutError:
            return None
        return (rank, message) if generation == self._processes.generation else None

    def turn(self) -> list[Event]:
        """Find out who is lost, start who is missing, and form a group when it is time; what has happened since.

        Raises:
            MoelessError: there is no way to go on.
        """
        self._drain()
        now_s = time.monotonic()
        if (gap_s := now_s - self._turned_s) > 1:  # this process was held up itself
            for member in self._members.values():
                member.heard_s += gap_s
                member.pulse_s += gap_s
        self._turned_s = now_s
        failed, self._failed = self._failed, []
        for member, why in failed:
            self._lose(member, "error", why, now_s)
        for member, reason, why in self._crew.overdue(now_s, is_broken=self._is_broken):
            self._lose(member, reason, why, now_s)
        self._processes.reap()
        self._crew.fill(now_s)
        if self._is_time():
            self._regroup(now_s)
        events, self._events = self._events, []
        return events

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask for statistics."""
        return time.monotonic() - self._asked_s >= _ASK_S

    def ask(self) -> None:
        """Have all ranks send their statistics. Raises `RankError` when one is gone."""
        self._asked_s = time.monotonic()
        self._processes.tell_all(AskStatistics())
        self._drain()

    def submit(self, rank: int, submission: Submission) -> None:
        """Have a rank run a completion. Raises `RankError` when one is gone."""
        self._processes.send(rank, partial(_submit, submission))
        self._drain()

    def abort(self, request_id: str) -> None:
        """Have all ranks drop a request. Raises `RankError` when one is gone."""
        self._processes.broadcast(partial(_abort, request_id))
        self._drain()

    def tell(self, rank: int, message: ToRank) -> None:
        """Send a message that wakes nobody. Raises `RankError` when the rank is gone."""
        assert not isinstance(message, Numbered), "the other ranks would not hear of it"
        self._processes.channel.send(self._processes.ranks[rank], message)
        self._drain()

    async def close(self, *, kill: bool) -> None:
        """End all processes: asked first unless told to kill; none is left. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._processes.channel.fileno())
        await asyncio.to_thread(partial(self._processes.close, kill=kill or not self.is_working))

    def _drain(self) -> None:
        while (received := self._processes.channel.receive(0)) is not None:
            number, message = received
            member, now_s = self._members.get(number), time.monotonic()
            if member is None:
                continue
            member.pulse_s = now_s
            if isinstance(message, Pulse):
                member.is_waiting = message.is_waiting
                continue
            member.heard_s = now_s
            if isinstance(message, Loaded):
                self.facts = self.facts or message.facts
                self._crew.note_loaded(member, now_s)
            elif isinstance(message, Failed):
                self._failed.append((member, message))
            elif isinstance(message, Formed | Broken):
                if message.generation == self._processes.generation:
                    self._note(member, message, now_s)
            elif member.state == "joined":
                rank = self._processes.ranks.index(number)
                self._inbox.put_nowait((self._processes.generation, rank, message))

    def _note(self, member: Member, message: Formed | Broken, now_s: float) -> None:
        """Take in how it went with the present group."""
        if isinstance(message, Broken):
            member.has_reported = True
            self._break(now_s)
            if message.error != RankError.__name__:
                self._unfit_size = max(self.size, self._unfit_size)
                self._unfit = Failed(message.error, message.message)
            return
        member.enter("joined", now_s)
        self._cost = self._cost or message.cost
        if self.is_working:
            self._has_formed = True
            self._events.append(Working(self.size, None if self._broken_s is None else now_s - self._broken_s))
            self._broken_s, self._num_unexplained, self._has_worked = None, 0, True

    def _break(self, now_s: float) -> None:
        self._is_broken = True
        self._broken_s = self._broken_s or now_s

    def _lose(self, member: Member, reason: Reason, why: Failed, now_s: float) -> None:
        lost = self._crew.lose(member, reason, why)
        if lost is None:
            return
        self._events.append(lost)
        if lost.was_rank:
            self._has_lost = True
            self._break(now_s)

    def _is_time(self) -> bool:
        """Whether a group is to be formed now. Raises `MoelessError` when none can be any more."""
        ranks, members = self._processes.ranks, self._members
        new = wanted(members.values(), ranks, self.target)
        is_loading = any(member.state == "loading" for member in members.values())
        if not new or (not self._processes.generation and len(new) < self.target):
            return False
        if len(new) <= self._unfit_size:  # more are needed for the model to fit
            if not self._has_worked:
                raise error_of(new[0], self._unfit)
            self._crew.target = max(self.target, self._unfit_size + 1)
            return False
        if self._is_broken:
            return self._has_lost or all(members[n].has_reported for n in ranks if n in members)
        is_forming = any(members[n].state == "forming" for n in ranks)
        return new != ranks and not is_forming and not (is_loading and set(new) - set(ranks))

    def _regroup(self, now_s: float) -> None:
        """Form the next group of those that are there. Raises `RankError` when groups break for no reason."""
        if self._is_broken and not self._has_lost:
            self._num_unexplained += 1
            if self._num_unexplained >= _MAX_UNEXPLAINED:
                raise RankError("ranks can't reach each other, though all are there; see the output above")
        new = wanted(self._members.values(), self._processes.ranks, self.target)
        self._processes.form(new, self._cost)
        self._crew.dismiss(new, now_s)
        for number in new:
            self._members[number].enter("forming", now_s)
        self._events.append(Regrouped(len(new), self._is_broken and self._has_formed))
        self._is_broken = self._has_lost = self._has_formed = False


def _submit(submission: Submission, number: int) -> Submit:
    return Submit(number, submission)


def _abort(request_id: str, number: int) -> Abort:
    return Abort(number, request_id)
