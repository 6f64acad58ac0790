"""What `benchmarks/overload.py` calls held, flat and failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import overload


def result(**changed: Any) -> dict[str, Any]:
    rows = []
    for number in range(1, 7):
        minute = overload.Minute(accepted=9, rejected=27, latencies_s=[0.5, 1.0], queued_max=40)
        minute.resident_mb = {"front": 400.0 + min(number, 2), "ranks": 900.0}
        rows.append(minute.row(number))
    rows[-1] |= changed
    return {"minutes": rows}


def test_a_run_that_holds() -> None:
    verdict = overload.judge(result(), bound=48)
    assert verdict["queue_bound_held"]
    assert verdict["memory_flat"]
    assert verdict["overloaded"]
    assert (verdict["failed"], verdict["p99_s_worst"]) == (0, 1.0)
    assert verdict["growth_after_warm_up"] == {"front": 0.0, "ranks": 0.0}


def test_runs_that_do_not() -> None:
    assert not overload.judge(result(queued_max=49), bound=48)["queue_bound_held"]
    assert not overload.judge(result(resident_mb={"front": 430.0, "ranks": 900.0}), bound=48)["memory_flat"]
    assert overload.judge(result(failed=3), bound=48)["failed"] == 3
    assert overload.judge({"minutes": result()["minutes"][:1]}, bound=48)["memory_flat"] is None


@pytest.mark.parametrize(("values", "share", "expected"), [([], 50, None), ([3, 1, 2], 50, 2), (range(1, 101), 99, 99)])
def test_percentiles(values: Any, share: int, expected: float | None) -> None:
    assert overload.percentile(values, share) == expected
