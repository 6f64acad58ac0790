"""`moeless bench report`: one self-contained HTML page of all result files in a folder, and its pictures as PNG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeless.bench.report_figures import draw_result
from moeless.bench.report_html import Section, render_page
from moeless.bench.report_sections import describe
from moeless.config.report import ReportConfig
from moeless.errors import DataError
from moeless.files import require_writable, write_text

_MAX_BYTES = 64 << 20
"""A JSON file larger than this is no result file."""


def run_report(config: ReportConfig) -> dict[str, Any]:
    """Write the page; the returned summary says what is on it.

    Raises:
        DataError: no such folder, no result file in it, or a damaged one.
    """
    results, skipped = find_results(config.folder)
    require_writable(config.page.parent)
    pictures = config.page.with_suffix("")
    sections = []
    for path, result in results:
        name = str(path.relative_to(config.folder))
        drawn = draw_result(result, pictures / path.relative_to(config.folder).with_suffix("")) if config.plots else []
        sections.append(describe(name, result, drawn))
    write_text(config.page, render_page(f"moeless: {config.folder.resolve().name}", sections))
    return {
        "page": str(config.page),
        "results": [_summary(section) for section in sections],
        "pictures": [str(picture) for section in sections for picture in section.pictures],
        "skipped": [str(path) for path in skipped],
    }


def find_results(folder: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[Path]]:
    """All result files below a folder, by path, and the other JSON files there.

    A result file is a JSON object whose `schema` is this project's.

    Raises:
        DataError: no such folder, or no result file.
    """
    if not folder.is_dir():
        raise DataError(f"no folder of results at {str(folder)!r}")
    results, others = [], []
    for path in sorted(folder.rglob("*.json")):
        content = _read(path)
        if isinstance(content, dict) and str(content.get("schema", "")).startswith("moeless."):
            results.append((path, content))
        else:
            others.append(path)
    if not results:
        raise DataError(
            f"no result file in {str(folder)!r}, which has {len(others)} other JSON files; "
            "moeless profile, finetune and bench write them"
        )
    return results, others


def print_report(summary: dict[str, Any]) -> None:
    """Say what was written."""
    for result in summary["results"]:
        print(f"{result['file']}: {result['schema']}, {result['source']}, {result['num_pictures']} pictures")
    if summary["skipped"]:
        print(f"not result files: {', '.join(summary['skipped'])}")
    print(f"written: {summary['page']}")


def _summary(section: Section) -> dict[str, Any]:
    return {
        "file": section.file,
        "schema": section.schema,
        "source": section.source,
        "num_pictures": len(section.pictures),
    }


def _read(path: Path) -> Any:
    """The content of a JSON file, None for a damaged or oversized one: a report shows what can be shown."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _MAX_BYTES else None
    except (OSError, ValueError):
        return None
