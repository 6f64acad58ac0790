"""The rank processes there are, and those there should be: starts who is missing, and lets go of who is lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from moeless.config.engine import EngineConfig
from moeless.config.serve import ServeConfig
from moeless.engine.hosts import HostList
from moeless.engine.launch import RankProcesses, error_of
from moeless.engine.messages import Failed
from moeless.engine.roster import Member, Reason, staff
from moeless.errors import CapacityError, RankError

_MAX_FAILED_STARTS = 3

log = logging.getLogger("moeless")


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank process is gone."""

    reason: Reason
    message: str
    was_rank: bool
    """Of the present group, which does not work any more."""


class Crew:
    """See the module's head.

    Attributes:
        target: how many ranks there should be.
        members: the processes by number.
    """

    def __init__(self, config: ServeConfig, hosts: HostList | None) -> None:
        """Nothing starts before the first `fill`."""
        self.target = config.ep
        self.members: dict[int, Member] = {}
        self.processes = RankProcesses(hosts)
        self._config, self._hosts = config, hosts
        self._num_failed_starts = 0
        self._is_told = False

    def scale(self, target: int) -> None:
        """Have another number of ranks from now on. Raises `CapacityError` when other hosts have no room for them."""
        num_remote = sum(member.is_remote for member in self.members.values())
        if self._hosts is not None and target - self._num_local(target) > num_remote + self._hosts.num_free():
            raise CapacityError(f"no other host has room for {target} ranks in all; start `moeless join` on one more")
        self.target, self._num_failed_starts = target, 0

    def fill(self, now_s: float) -> None:
        """Start who is missing, if there is room, and end who loads the model for nothing.

        Raises:
            RankError: starts fail again and again, and nobody is left.
        """
        if self._hosts is not None:
            self._hosts.pump()
        present = staff(self.members.values(), self.target)
        for member in present[self.target :]:
            if member.state == "loading":
                self._forget(member)
        if len(present) >= self.target:
            return
        if self._num_failed_starts >= _MAX_FAILED_STARTS:
            if not present:
                raise RankError(f"{self._num_failed_starts} starts of ranks in a row have failed; see the output above")
            log.error("%d starts in a row have failed; going on with %d rank(s)", _MAX_FAILED_STARTS, len(present))
            self.target, self._num_failed_starts = len(present), 0
        for _ in range(self.target - len(present)):
            self._start(now_s)

    def overdue(self, now_s: float, *, is_broken: bool) -> list[tuple[Member, Reason, Failed]]:
        """The members that have died, or that are to be taken for dead, and why."""
        found: list[tuple[Member, Reason, Failed]] = []
        for member in self.members.values():
            if (how := self.processes.how_ended(member.number)) is not None:
                found.append((member, "death", Failed("RankError", f"died ({how}); see its output above")))
            elif late := member.overdue(
                now_s,
                start_timeout_s=self._config.start_timeout,
                heartbeat_timeout_s=self._config.heartbeat_timeout,
                is_broken=is_broken and member.number in self.processes.ranks,
            ):
                found.append((member, "silence", Failed("RankError", late)))
        return found

    def lose(self, member: Member, reason: Reason, why: Failed) -> Lost | None:
        """Let go of a process; None for one that nobody waits for, or that was only starting.

        Raises:
            MoelessError: there has never been a group, or none is left and nobody is to be replaced.
        """
        self._forget(member)
        if member.state == "leaving":
            return None
        ranks = self.processes.ranks
        name = f"rank {ranks.index(member.number)}" if member.number in ranks else f"rank process {member.number}"
        message = f"{name} {why.message}" if why.error == "RankError" else str(error_of(member.number, why))
        if member.state == "loading":
            self._num_failed_starts += 1
            if not self.processes.generation:
                raise error_of(member.number, why) if reason == "error" else RankError(message)
            log.warning("%s while it was starting", message)
            return None
        if self._config.on_rank_failure == "shrink":
            self.target = len(staff(self.members.values(), self.target))
            if not self.target:
                raise RankError(f"{message}, and it was the last")
        return Lost(reason, message, member.number in ranks)

    def note_loaded(self, member: Member, now_s: float) -> None:
        """A process has loaded the model."""
        member.enter("loaded", now_s)
        self._num_failed_starts = 0

    def dismiss(self, ranks: list[int], now_s: float) -> None:
        """Of those that have loaded the model only `ranks` are wanted; the others were told to leave or are ended."""
        for member in list(self.members.values()):
            if member.number in ranks or member.state in ("loading", "leaving"):
                continue
            if member.state == "loaded":
                self._forget(member)
            else:
                member.enter("leaving", now_s)

    def _forget(self, member: Member) -> None:
        self.processes.kill(member.number)
        del self.members[member.number]

    def _num_local(self, target: int) -> int:
        return target if self._hosts is None else min(target, self._config.local_ranks or 0)

    def _start(self, now_s: float) -> None:
        """Start a process on this host or another; nothing happens when that has no room yet."""
        num_local, present = self._num_local(self.target), staff(self.members.values(), self.target)
        is_remote = sum(not member.is_remote for member in present) >= num_local
        if is_remote and (self._hosts is None or self._hosts.num_free() < 1):
            if not self._is_told:
                log.info("waiting for other hosts to join at %s with more ranks", self._config.rank_address)
                self._is_told = True
            return
        self._is_told = False
        engine = EngineConfig(**self._config.engine_values())
        engine = replace(engine, ep=engine.ep if self.target == 1 and engine.expert_slots else self.target)
        seats = {member.seat for member in self.members.values()}
        seat = min(set(range(len(seats) + 1)) - seats)
        number = self.processes.start(engine, seat=seat, num_local=max(1, num_local), is_remote=is_remote)
        self.members[number] = Member(
            number=number, seat=seat, is_remote=is_remote, is_whole=engine.runs_whole, since_s=now_s
        )
