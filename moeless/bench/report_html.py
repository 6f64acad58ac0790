"""A page of sections as one HTML file: styles and pictures inside, no script, nothing fetched."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

_TEXT = ' class="text"'

MAX_ROWS = 60
"""Rows of a table that are shown; the rest is in the result file."""

_STYLE = """
:root { --ink: #1b1f24; --soft: #667085; --line: #e4e7ec; --back: #f8f9fb; --live: #147d4f; --simulated: #9a5b00; }
body { margin: 0 auto; max-width: 1100px; padding: 24px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 0; } h3 { font-size: 15px; margin: 20px 0 6px; }
section { border-top: 1px solid var(--line); padding: 22px 0; }
nav a { margin-right: 14px; } a { color: #1456b8; text-decoration: none; }
.badge { border-radius: 9px; padding: 1px 9px; font-size: 12px; color: #fff; vertical-align: 2px; margin-left: 8px; }
.live { background: var(--live); } .simulated { background: var(--simulated); } .unknown { background: var(--soft); }
.command { font: 12px/1.5 ui-monospace, monospace; color: var(--soft); overflow-wrap: anywhere; margin: 4px 0 10px; }
.headline { background: var(--back); border-left: 4px solid var(--soft); padding: 8px 12px; margin: 10px 0; }
.note { color: var(--soft); font-size: 13px; margin: 2px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.text { text-align: left; } figure { margin: 14px 0; } img { max-width: 100%; height: auto; }
details { margin-top: 12px; } summary { color: var(--soft); cursor: pointer; font-size: 13px; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of plain values under column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What the page says about one result file."""

    file: str
    schema: str
    source: str
    command: str
    headlines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Path, ...] = ()
    details: tuple[Table, ...] = field(default=())
    """Tables that start folded away."""


def render_page(title: str, sections: list[Section]) -> str:
    """The whole page; pictures are read and put inside."""
    links = "".join(f'<a href="#s{i}">{escape(s.file)}</a>' for i, s in enumerate(sections))
    body = "\n".join(_section(i, section) for i, section in enumerate(sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1><nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def format_value(value: Any) -> str:
    """A value as text: four significant digits, thousands apart, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _section(index: int, section: Section) -> str:
    kind = section.source if section.source in ("live", "simulated") else "unknown"
    word = {"live": "measured", "simulated": "simulated, not measured"}.get(kind, "source not stated")
    parts = [
        f'<section id="s{index}"><h2>{escape(section.file)}<span class="badge {kind}">{word}</span></h2>',
        f'<div class="command">{escape(section.schema)} &nbsp; {escape(section.command)}</div>',
        *(f'<div class="headline">{escape(text)}</div>' for text in section.headlines),
        *(_table(table) for table in section.tables),
        *(_picture(picture) for picture in section.pictures),
        *(f'<div class="note">note: {escape(text)}</div>' for text in section.notes),
        *(f"<details><summary>{escape(t.title)}</summary>{_table(t, False)}</details>" for t in section.details),
        "</section>",
    ]
    return "\n".join(parts)


def _table(table: Table, titled: bool = True) -> str:
    wordy = [any(isinstance(row[i], str) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(
        f"<th{_TEXT if is_text else ''}>{escape(column)}</th>"
        for column, is_text in zip(table.columns, wordy, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows[:MAX_ROWS])
    more = len(table.rows) - MAX_ROWS
    rest = f'<div class="note">{more:,} more rows in the file</div>' if more > 0 else ""
    title = f"<h3>{escape(table.title)}</h3>" if titled else ""
    return f'{title}<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>{rest}'


def _cell(value: Any) -> str:
    return f"<td{_TEXT if isinstance(value, str) else ''}>{escape(format_value(value))}</td>"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'
