"""The front end's engine side: takes completions in, gives their tokens out, and outlives its ranks.

Requests stand in the ledger; a team of ranks works them off. Whenever the team forms another group, because ranks were
lost or because their number is to change, every unfinished completion goes on where it was: its client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from moeless.config.serve import ServeConfig
from moeless.engine.crew import Lost
from moeless.engine.facts import ModelFacts
from moeless.engine.hosts import HostList
from moeless.engine.ledger import Entry, Ledger
from moeless.engine.messages import Advanced, Progress, Record, Recorded, Statistics, ToFront
from moeless.engine.prometheus import ServiceMetrics
from moeless.engine.request import FinishReason
from moeless.engine.submission import Submission
from moeless.engine.supervisor import Event, RankTeam, Regrouped, Working
from moeless.errors import CapacityError, MoelessError, RankError

State = Literal["loading", "ready", "draining", "failed"]
_MAX_LOSSES = 3
"""Losses of working groups in a row, without a token in between, after which a request is given up."""
_ANSWER_S = 2.0

log = logging.getLogger("moeless")


class Front:
    """See the module's head. One event loop only."""

    def __init__(self, config: ServeConfig, metrics: ServiceMetrics) -> None:
        """Nothing starts before `run`."""
        self.config, self.metrics = config, metrics
        self.state: State = "loading"
        self.facts: ModelFacts | None = None
        """Known once the model is loaded and all ranks work."""
        self.ledger = Ledger()
        self._team: RankTeam | None = None
        self._inboxes: dict[str, asyncio.Queue[Progress]] = {}
        self._fresh = asyncio.Event()
        """Set when all ranks have answered the last question for statistics."""
        self._unanswered: set[int] = set()
        self._recorded: asyncio.Future[Recorded] | None = None
        self._is_stopping = self._is_scaling = False
        self._hosts = None
        if config.rank_address is not None:
            self._hosts = HostList(config.rank_address, os.environ.get("MOELESS_RANK_KEY", ""))

    async def run(self) -> None:
        """Keep ranks working until cancelled; then none is left.

        Raises:
            MoelessError: the model can't be loaded, or ranks are lost and not to be replaced.
        """
        team = self._team = RankTeam(self.config, self._hosts)
        try:
            while True:
                received = await team.receive()
                if received is not None:
                    self._take(*received)
                if team.is_due and team.is_working:
                    self._ask(team)
                for event in team.turn():
                    self._note(team, event)
        except MoelessError:
            self.state = "failed"
            self._end_all("error")
            raise
        finally:
            self._team = None
            await team.close(kill=not self._is_stopping)

    async def scale(self, num_ranks: int) -> None:
        """Have `num_ranks` ranks from now on; returns when they work. Requests go on.

        Raises:
            CapacityError: another change is under way, or there is no room for so many.
            RankError: it did not come to that.
        """
        team = self._team
        if team is None or self.state != "ready":
            raise RankError("ranks can be added or removed only while all is well")
        if self._is_scaling or team.size != team.target:
            raise CapacityError("the number of ranks is being changed already")
        if num_ranks > self.config.most_ranks:
            raise CapacityError(f"{num_ranks} ranks are more than --max-ep {self.config.most_ranks}")
        self._is_scaling, before = True, team.target
        log.info("going from %d to %d rank(s)", before, num_ranks)
        try:
            team.scale(num_ranks)
            while not (team.is_working and team.size == num_ranks):
                await asyncio.sleep(0.02)
                if self._team is None or team.target != num_ranks:
                    raise RankError(f"going to {num_ranks} ranks failed; the log says why")
        finally:
            self._is_scaling = False

    def stop(self) -> None:
        """End every completion; `run`, cancelled next, will ask its ranks to end instead of killing them."""
        self._is_stopping = True
        self._end_all("abort")

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing more in and wait until all is done; whether it was, within `timeout_s`."""
        self.state = "draining"
        deadline = time.monotonic() + timeout_s
        while self.ledger.num_live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self.ledger.num_live

    @contextmanager
    def running(self, submissions: Sequence[Submission]) -> Iterator[AsyncIterator[Progress]]:
        """Run completions; gives their tokens as they come. What has not ended at the exit is dropped.

        Their request ids are new, and one client's may have several.

        Raises:
            CapacityError: too many are waiting.
        """
        if self.ledger.num_live + len(submissions) > self.capacity:
            self.metrics.reject("queue_full")
            raise CapacityError(f"the queue is full: {self.ledger.num_live} completions run or wait")
        inbox: asyncio.Queue[Progress] = asyncio.Queue()
        request_ids = {submission.request_id for submission in submissions}
        self._inboxes.update(dict.fromkeys(request_ids, inbox))
        try:
            entries = self.ledger.add(submissions, time.monotonic())
            with suppress(RankError):  # `run` notices too, and resumes what is in the ledger
                self._assign(entries)
            yield _until_all_end(inbox, len(submissions))
        finally:
            for request_id in request_ids:
                self._abort(request_id)

    async def refresh(self) -> None:
        """Bring the metrics up to date, as far as the ranks answer within a moment."""
        team = self._team
        if team is None:
            return
        if team.is_working:
            self._ask(team)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), _ANSWER_S)
        self.metrics.set_ranks(team.num_joined, team.num_joining, team.silence_s())

    async def record(self, message: Record) -> Recorded:
        """Start, stop or write the record of rank 0, which sees what all see.

        Raises:
            CapacityError: another such call is running.
            RankError: the rank is not there or does not answer.
        """
        if self._recorded is not None:
            raise CapacityError("another call for the expert distribution record is running")
        if self._team is None or not self._team.is_working:
            raise RankError("no ranks are running")
        self._recorded = asyncio.get_running_loop().create_future()
        try:
            self._team.tell(0, message)
            return await asyncio.wait_for(self._recorded, self.config.heartbeat_timeout)
        except TimeoutError:
            raise RankError("rank 0 does not answer") from None
        finally:
            self._recorded = None

    def problem(self) -> str | None:
        """Why requests can't be run just now; None when all ranks work."""
        if self.state in ("loading", "failed") or self._team is None:
            return "the model is being loaded" if self.state == "loading" else "ranks were lost"
        if self._team.is_recovering:
            return "a rank was lost; the others take over"
        silence_s = self._team.silence_s()
        return None if silence_s < self.config.heartbeat_timeout else f"a rank is silent for {silence_s:.0f} s"

    @property
    def num_ranks(self) -> int:
        """Ranks that work."""
        return 0 if self._team is None else self._team.num_joined

    @property
    def capacity(self) -> int:
        """Completions taken on at once, running and waiting."""
        return self.config.capacity_of(self.config.ep if self._team is None else self._team.target)

    def _note(self, team: RankTeam, event: Event) -> None:
        if isinstance(event, Lost):
            log.error("%s", event.message)
            self.metrics.lose_rank(event.reason)
            if self.config.on_rank_failure == "exit":
                raise RankError(event.message)
        elif isinstance(event, Regrouped):
            self.metrics.start_group()
            self._reassign(is_after_loss=event.is_after_loss)
        elif isinstance(event, Working):
            self._begin(team, event)

    def _begin(self, team: RankTeam, event: Working) -> None:
        """All ranks of a group work."""
        self.facts = team.facts
        if event.pause_s is not None:
            self.metrics.recover(event.pause_s)
            log.info("%d rank(s) work, %.2f s after the loss", event.size, event.pause_s)
        else:
            log.info("%d rank(s) work", event.size)
        if self.state == "loading":
            self.state = "ready"

    def _reassign(self, *, is_after_loss: bool) -> None:
        """Give the ranks of a new group what is unfinished."""
        entries = self.ledger.entries()
        for entry in entries:
            entry.rank = None
            entry.num_losses += is_after_loss
        for entry in entries:
            if entry.num_losses >= _MAX_LOSSES:
                self._deliver(Progress(entry.submission.request_id, entry.submission.index, None, None, "error"))
            else:
                with suppress(RankError):  # noticed by `run`
                    self._assign([entry])

    def _take(self, rank: int, message: ToFront) -> None:
        if isinstance(message, Advanced):
            self.metrics.count_step(message.num_tokens)
            for progress in message.progress:
                self._deliver(progress)
        elif isinstance(message, Statistics):
            self.metrics.update_rank(rank, message.values)
            if message.traffic is not None:
                self.metrics.experts.update_traffic(message.traffic)
            self._unanswered.discard(rank)
            if not self._unanswered:
                self._fresh.set()
        elif isinstance(message, Recorded) and self._recorded is not None and not self._recorded.done():
            self._recorded.set_result(message)

    def _ask(self, team: RankTeam) -> None:
        self._fresh.clear()
        self._unanswered = set(range(team.size))
        with suppress(RankError):  # noticed by `run`
            team.ask()

    def _assign(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if self._team is not None and self._team.size:
                entry.rank = self.ledger.least_loaded(self._team.size)
                self._team.submit(entry.rank, entry.resumption())

    def _deliver(self, progress: Progress) -> None:
        now_s = time.monotonic()
        entry = self.ledger.take(progress, now_s)
        if entry is None:
            return
        if progress.token is not None:
            self.metrics.count_token(entry, now_s)
            entry.last_s = now_s
        if progress.finish_reason is not None:
            self.metrics.count_end(entry, progress.finish_reason, now_s)
        if (inbox := self._inboxes.get(progress.request_id)) is not None:
            inbox.put_nowait(progress)

    def _abort(self, request_id: str) -> None:
        del self._inboxes[request_id]
        entries = self.ledger.remove(request_id)
        for entry in entries:
            self.metrics.count_end(entry, "abort", time.monotonic())
        if entries and self._team is not None:
            with suppress(RankError):
                self._team.abort(request_id)

    def _end_all(self, reason: FinishReason) -> None:
        for entry in self.ledger.entries():
            self._deliver(Progress(entry.submission.request_id, entry.submission.index, None, None, reason))


async def _until_all_end(inbox: asyncio.Queue[Progress], num_left: int) -> AsyncIterator[Progress]:
    while num_left:
        progress = await inbox.get()
        num_left -= progress.finish_reason is not None
        yield progress
