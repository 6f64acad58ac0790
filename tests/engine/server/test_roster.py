"""Who counts as lost, and who should be the group: plain data."""

from __future__ import annotations

from typing import Any

import pytest

from moeless.engine.roster import BROKEN_PULSE_S, LEAVE_S, Member, State, staff, wanted

LIMITS: dict[str, Any] = {"start_timeout_s": 100.0, "heartbeat_timeout_s": 10.0, "is_broken": False}


def member(number: int = 0, state: State = "joined", *, is_whole: bool = False) -> Member:
    made = Member(number=number, seat=number, is_remote=False, is_whole=is_whole, since_s=0.0)
    made.enter(state, 0.0)
    return made


@pytest.mark.parametrize(
    ("state", "last_s", "says"),
    [
        ("loading", 100.0, "did not load"),
        ("loaded", 10.0, "said nothing"),
        ("forming", 10.0, "said nothing"),
        ("joined", 10.0, "said nothing"),
        ("leaving", LEAVE_S, "did not end"),
    ],
)
def test_each_state_has_a_limit(state: State, last_s: float, says: str) -> None:
    one = member(state=state)
    assert one.overdue(last_s, **LIMITS) is None
    assert says in (one.overdue(last_s + 0.1, **LIMITS) or "")


def test_who_waits_for_others_is_not_to_blame() -> None:
    waiting, stuck = member(0), member(1)
    waiting.is_waiting = True
    for one in (waiting, stuck):
        one.pulse_s = 11.0
    assert waiting.overdue(11.0, **LIMITS) is None
    assert "no step" in (stuck.overdue(11.0, **LIMITS) or "")


def test_a_broken_group_waits_less_for_those_that_have_not_said_so() -> None:
    limits = {**LIMITS, "is_broken": True}
    silent, reported = member(0), member(1)
    reported.has_reported = True
    assert silent.overdue(BROKEN_PULSE_S + 0.1, **limits) is not None
    assert reported.overdue(BROKEN_PULSE_S + 0.1, **limits) is None


def test_a_joining_rank_has_as_long_as_a_starting_one() -> None:
    one = member(state="forming")
    one.pulse_s = 101.0
    assert "did not join" in (one.overdue(101.0, **LIMITS) or "")


def test_the_group_keeps_its_order_and_takes_newcomers_behind() -> None:
    members = [
        member(n, state) for n, state in enumerate(("joined", "loaded", "joined", "loading", "leaving", "loaded"))
    ]
    assert wanted(members, [2, 0], 9) == [2, 0, 1, 5]
    assert wanted(members, [2, 0], 3) == [2, 0, 1]
    assert wanted(members, [2, 0], 1) == [2]
    assert wanted(members, [], 2) == [0, 1]


def test_a_whole_model_serves_until_others_can_share() -> None:
    whole, sharing = member(0, is_whole=True), member(1, "loading")
    assert wanted([whole, sharing], [0], 2) == [0]
    assert staff([whole, sharing], 2) == [sharing]
    assert staff([whole, sharing], 1) == [whole, sharing]
    sharing.enter("loaded", 0.0)
    assert wanted([whole, sharing], [0], 2) == [1]
