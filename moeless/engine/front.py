"""The front end's engine side: takes completions in, gives their tokens out, and outlives its ranks.

Requests stand in the ledger; a team of ranks works them off. When the team is lost and `--on-rank-failure restart` is
set, a new one is started and every unfinished completion goes on where it was: its client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from moeless.config.engine import EngineConfig
from moeless.config.serve import ServeConfig
from moeless.engine.engine import ModelFacts
from moeless.engine.hosts import HostList
from moeless.engine.ledger import Entry, Ledger
from moeless.engine.messages import Advanced, Progress, Record, Recorded, Statistics, ToFront
from moeless.engine.prometheus import ServiceMetrics
from moeless.engine.request import FinishReason
from moeless.engine.submission import Submission
from moeless.engine.supervisor import RankTeam
from moeless.errors import CapacityError, RankError

State = Literal["loading", "ready", "recovering", "draining", "failed"]
_MAX_LOSSES = 3
"""Teams in a row that may be lost before a request, or the service, gives up."""
_ANSWER_S = 2.0

log = logging.getLogger("moeless")


class Front:
    """See the module's head. One event loop only."""

    def __init__(self, config: ServeConfig, metrics: ServiceMetrics) -> None:
        """Nothing starts before `run`."""
        self.config, self.metrics = config, metrics
        self.state: State = "loading"
        self.facts: ModelFacts | None = None
        """Known once the model is loaded."""
        self.ledger = Ledger()
        self._team: RankTeam | None = None
        self._inboxes: dict[str, asyncio.Queue[Progress]] = {}
        self._fresh = asyncio.Event()
        """Set when all ranks have answered the last question for statistics."""
        self._unanswered: set[int] = set()
        self._recorded: asyncio.Future[Recorded] | None = None
        self._is_stopping = False
        self._lost_s = time.monotonic()
        self._hosts = None
        if config.rank_address is not None:
            self._hosts = HostList(config.rank_address, os.environ.get("MOELESS_RANK_KEY", ""))

    async def run(self) -> None:
        """Keep ranks working until cancelled; then none is left.

        Raises:
            MoelessError: the model can't be loaded, or ranks are lost and not to be replaced.
        """
        num_losses = 0
        while True:
            team = await self._start_team()
            try:
                self.facts = await team.start()
                self._welcome(team)
                await self._work(team)
            except RankError as error:
                num_losses = 1 if self._team is team else num_losses + 1
                self._team = None
                self._lose(error, for_good=num_losses >= _MAX_LOSSES or self.config.on_rank_failure == "exit")
            finally:
                self._team = None
                await team.close(kill=not self._is_stopping)

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
        if self.ledger.num_live + len(submissions) > self.config.capacity:
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
        if self._team is not None and self.state in ("ready", "draining"):
            self._ask(self._team)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), _ANSWER_S)
        since_lost_s = time.monotonic() - self._lost_s
        self.metrics.silence_s = since_lost_s if self._team is None else self._team.silence_s()

    async def record(self, message: Record) -> Recorded:
        """Start, stop or write the record of rank 0, which sees what all see.

        Raises:
            CapacityError: another such call is running.
            RankError: the rank is not there or does not answer.
        """
        if self._recorded is not None:
            raise CapacityError("another call for the expert distribution record is running")
        if self._team is None:
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
        if self.state in ("loading", "recovering", "failed") or self._team is None:
            return {"loading": "the model is being loaded", "failed": "ranks were lost"}.get(
                self.state, "ranks were lost and are started again"
            )
        silence_s = self._team.silence_s()
        return None if silence_s < self.config.heartbeat_timeout else f"a rank is silent for {silence_s:.0f} s"

    async def _start_team(self) -> RankTeam:
        """Start all ranks, once hosts have joined with those that are not to be here."""
        config, hosts = self.config, self._hosts
        engine_config = EngineConfig(**config.engine_values())
        if hosts is None:
            return RankTeam(engine_config, config.heartbeat_timeout)
        needed = config.ep - (config.local_ranks or 0)
        if hosts.num_free() < needed:
            log.info("waiting for other hosts to join at %s with %d rank(s)", config.rank_address, needed)
        while True:
            while hosts.num_free() < needed:
                await asyncio.sleep(0.1)
            try:
                return RankTeam(engine_config, config.heartbeat_timeout, hosts, config.local_ranks)
            except RankError as error:  # a host has gone since
                log.warning("%s", error)

    def _welcome(self, team: RankTeam) -> None:
        """Give a new team what is unfinished."""
        self._team = team
        self.metrics.start_team(team.size)
        entries = self.ledger.entries()
        for entry in entries:
            entry.rank = None
        for entry in entries:
            if entry.num_losses >= _MAX_LOSSES:
                self._deliver(Progress(entry.submission.request_id, entry.submission.index, None, None, "error"))
            else:
                self._assign([entry])
        if self.state != "draining":
            self.state = "ready"
        log.info("%d rank%s ready", team.size, "" if team.size == 1 else "s")

    async def _work(self, team: RankTeam) -> None:
        while True:
            received = await team.receive()
            if received is not None:
                self._take(*received)
            if team.is_due:
                self._ask(team)
            team.check_silence()

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
            if self._team is not None:
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

    def _lose(self, error: RankError, for_good: bool) -> None:
        """Take note of a lost team. Raises the error when nothing is to follow."""
        self.metrics.lose_team(self.config.ep, str(error))
        self._lost_s = time.monotonic()
        if self.state == "loading" or for_good:
            self.state = "failed"
            self._end_all("error")
            raise error
        log.error("%s; starting the ranks again", error)
        for entry in self.ledger.entries():
            entry.num_losses += 1
        if self.state != "draining":
            self.state = "recovering"

    def _end_all(self, reason: FinishReason) -> None:
        for entry in self.ledger.entries():
            self._deliver(Progress(entry.submission.request_id, entry.submission.index, None, None, reason))


async def _until_all_end(inbox: asyncio.Queue[Progress], num_left: int) -> AsyncIterator[Progress]:
    while num_left:
        progress = await inbox.get()
        num_left -= progress.finish_reason is not None
        yield progress
