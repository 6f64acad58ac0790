"""docs/robustness.md names tests; they exist, and all 37 threads are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "robustness.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 50
    assert [name for name in named if f"def {name[1]}(" not in sources.get(name[0], "")] == []


def test_every_thread_has_its_line() -> None:
    rows = re.findall(r"^\| (\d+) \| .+? \| .+? \| .+ \|$", TEXT, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 38))
