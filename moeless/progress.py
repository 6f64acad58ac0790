"""Progress bars for long work: on stderr, so that stdout stays machine-readable; silent where stderr is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Give a function that advances a bar by so many `unit`s; the bar shows the rate and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total, rate="")
        began_s, done = time.monotonic(), 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            per_s = done / max(time.monotonic() - began_s, 1e-9)
            progress.update(task, advance=amount, rate=f"{per_s:,.0f} {unit}/s")

        yield advance
