"""The one look of all tables on the terminal: no frames, so that they fit into 80 columns."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def compact_table(
    first: str, *others: str, left: Container[str] = (), title: str | None = None, caption: str | None = None
) -> Table:
    """A table with these column heads; all but the first and those in `left` hold numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name in left)
    return table
