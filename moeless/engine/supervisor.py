"""The rank processes as an event loop sees them: started without waiting, watched for death and silence.

A team is one generation of ranks. When a rank is lost the team ends, and whoever wants to go on makes a new one; the
requests are in the ledger, not here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from moeless.config.engine import EngineConfig
from moeless.engine.engine import ModelFacts
from moeless.engine.hosts import HostList
from moeless.engine.launch import RankProcesses, error_of
from moeless.engine.messages import Abort, AskStatistics, Failed, Numbered, Ready, Submit, ToFront, ToRank
from moeless.engine.submission import Submission
from moeless.errors import RankError

_POLL_S = 0.1
_ASK_S = 1.0
"""How often ranks are asked for their statistics, which is their heartbeat too."""


class RankTeam:
    """See the module's head. To be made and used in one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        heartbeat_timeout_s: float,
        hosts: HostList | None = None,
        num_local: int | None = None,
    ) -> None:
        """Start the processes. Raises `RankError` when `hosts` have no room for those from number `num_local` on."""
        self._config, self._heartbeat_timeout_s = config, heartbeat_timeout_s
        self._ranks = RankProcesses(config, hosts, num_local)
        self._inbox: asyncio.Queue[tuple[int, ToFront]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ranks.channel.fileno(), self._drain)
        self._heard_s = [time.monotonic()] * config.ep
        self._asked_s = 0.0
        self._is_open = True
        self._drain()

    @property
    def size(self) -> int:
        """Ranks."""
        return self._ranks.size

    def silence_s(self) -> float:
        """Seconds since the quietest rank's last word; a rank speaks after every step, and when it is asked."""
        return time.monotonic() - min(self._heard_s)

    async def start(self) -> ModelFacts:
        """Wait until all ranks have loaded the model.

        Raises:
            MoelessError: what went wrong on one.
        """
        facts: dict[int, ModelFacts] = {}
        deadline = time.monotonic() + self._config.start_timeout
        while len(facts) < self.size:
            if time.monotonic() > deadline:
                late = sorted(set(range(self.size)) - set(facts))
                raise RankError(f"ranks {late} did not load the model within {self._config.start_timeout:g} s")
            received = await self.receive()
            if received is not None and isinstance(received[1], Ready):
                facts[received[0]] = received[1].facts
        self._ranks.is_ready = True
        self._heard_s = [time.monotonic()] * self.size
        return facts[0]

    async def receive(self) -> tuple[int, ToFront] | None:
        """The next message and its rank, or None after a moment.

        Raises:
            MoelessError: a rank failed or died.
        """
        if self._inbox.empty():
            try:
                rank, message = await asyncio.wait_for(self._inbox.get(), _POLL_S)
            except TimeoutError:
                self._ranks.check_alive()
                return None
        else:
            rank, message = self._inbox.get_nowait()
        if isinstance(message, Failed):
            raise error_of(rank, message)
        self._heard_s[rank] = time.monotonic()
        return rank, message

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask for a sign of life."""
        return time.monotonic() - self._asked_s >= _ASK_S

    def check_silence(self) -> None:
        """Raises `RankError` when a rank has been silent for too long."""
        if self.silence_s() > self._heartbeat_timeout_s:
            rank = self._heard_s.index(min(self._heard_s))
            raise RankError(f"rank {rank} has said nothing for {self._heartbeat_timeout_s:g} s; it hangs")

    def ask(self) -> None:
        """Have all ranks send their statistics. Raises `RankError` when one is gone."""
        self._asked_s = time.monotonic()
        self._ranks.check_alive()
        self._ranks.tell_all(AskStatistics())
        self._drain()

    def submit(self, rank: int, submission: Submission) -> None:
        """Have a rank run a completion. Raises `RankError` when one is gone."""
        self._number(partial(_submit, submission), rank)

    def abort(self, request_id: str) -> None:
        """Have all ranks drop a request. Raises `RankError` when one is gone."""
        self._number(partial(_abort, request_id))

    def tell(self, rank: int, message: ToRank) -> None:
        """Send a message that wakes nobody. Raises `RankError` when the rank is gone."""
        assert not isinstance(message, Numbered), "the other ranks would not hear of it"
        self._ranks.channel.send(rank, message)
        self._drain()

    async def close(self, *, kill: bool) -> None:
        """End the ranks: asked first unless told to kill; none is left. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._ranks.channel.fileno())
        self._ranks.is_ready = self._ranks.is_ready and not kill
        await asyncio.to_thread(self._ranks.close)

    def _number(self, make: Callable[[int], Numbered], rank: int | None = None) -> None:
        if rank is None:
            self._ranks.broadcast(make)
        else:
            self._ranks.send(rank, make)
        self._drain()

    def _drain(self) -> None:
        while (received := self._ranks.channel.receive(0)) is not None:
            self._inbox.put_nowait(received)


def _submit(submission: Submission, number: int) -> Submit:
    return Submit(number, submission)


def _abort(request_id: str, number: int) -> Abort:
    return Abort(number, request_id)
