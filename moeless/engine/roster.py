"""Who the rank processes are, what each is at, and when one counts as lost. Plain data and functions; no processes.

A hung rank takes the others with it: they wait for it and say nothing either. So every process also has a pulse, from
a thread of its own, that says whether the rank waits for others: those that do are never the ones to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["loading", "loaded", "forming", "joined", "leaving"]
Reason = Literal["death", "silence", "error"]

LEAVE_S = 5.0
"""How long a process that is no longer wanted may take to end."""
BROKEN_PULSE_S = 3.0
"""A rank of a broken group without a pulse for so long is lost: that is then the likely cause."""


@dataclass(slots=True, kw_only=True)
class Member:
    """A rank process. Times are of one monotonic clock, in seconds."""

    number: int
    seat: int
    is_remote: bool
    is_whole: bool
    """It has loaded the model with its experts, so it can serve alone only."""
    since_s: float
    """When its state began."""
    state: State = "loading"
    heard_s: float = 0.0
    """Its last word, which comes after every step and when it is asked."""
    pulse_s: float = 0.0
    is_waiting: bool = False
    has_reported: bool = False
    """It has said that the group is broken."""

    def enter(self, state: State, now_s: float) -> None:
        """Be in another state from now on."""
        self.state, self.since_s, self.heard_s, self.pulse_s = state, now_s, now_s, now_s
        self.has_reported = self.is_waiting = False

    def overdue(
        self, now_s: float, *, start_timeout_s: float, heartbeat_timeout_s: float, is_broken: bool
    ) -> str | None:
        """Why it counts as lost though its process runs; None if it doesn't. `is_broken`: its group is."""
        age_s, silence_s = now_s - self.since_s, now_s - self.pulse_s
        if self.state == "loading":
            return f"did not load the model within {start_timeout_s:g} s" if age_s > start_timeout_s else None
        if self.state == "leaving":
            return f"did not end within {LEAVE_S:g} s" if age_s > LEAVE_S else None
        if self.state == "forming" and age_s > start_timeout_s:
            return f"did not join its group within {start_timeout_s:g} s"
        limit_s = heartbeat_timeout_s
        if is_broken and not self.has_reported:
            limit_s = min(limit_s, BROKEN_PULSE_S)
        if silence_s > limit_s:
            return f"has said nothing for {limit_s:g} s; it hangs"
        if self.state == "joined" and not self.is_waiting and now_s - self.heard_s > heartbeat_timeout_s:
            return f"has made no step for {heartbeat_timeout_s:g} s, and waits for nobody; it hangs"
        return None


def wanted(members: Iterable[Member], ranks: Sequence[int], target: int) -> list[int]:
    """The members that should be the group: at most `target`, those of the present `ranks` first and in their order."""
    able = [member for member in members if member.state in ("loaded", "forming", "joined")]
    sharing = [member.number for member in able if not member.is_whole]
    numbers = sharing or [member.number for member in able][:1]
    ordered = [number for number in ranks if number in numbers]
    return [*ordered, *sorted(set(numbers) - set(ordered))][:target]


def staff(members: Iterable[Member], target: int) -> list[Member]:
    """The members that count towards `target`, whatever they are at."""
    return [m for m in members if m.state != "leaving" and (target == 1 or not m.is_whole)]
