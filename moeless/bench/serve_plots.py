"""The picture of `moeless bench serve`, from its result alone: latencies, throughput, balance and cost by run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moeless.bench.figures import Figures, colours

_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def draw_serve(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `serve.png`; the files written."""
    rows = [row for row in result["runs"] if row["completed"]]
    if not rows:
        return []
    figures = Figures(folder)
    figure, (times, rates, balance) = figures.new(3, width=12)
    _draw_latencies(times, rows)
    names, shades = [row["name"] for row in rows], colours(rows)
    rates.barh(names, [row["output_throughput"] for row in rows], color=shades)
    rates.set(xlabel="output tokens a second", title="throughput (measured)")
    rates.invert_yaxis()
    experts = [row["moe"] or {} for row in rows]
    even = [block.get("balancedness") or np.nan for block in experts]
    balance.barh(names, even, color=shades)
    balance.axvline(1.0, color="tab:green", linestyle=":")
    balance.set(xlabel="largest over mean rank load", title="balance of sampled steps", xlim=(0, None))
    balance.invert_yaxis()
    figures.save(figure, "serve.png")
    return figures.written


def _draw_latencies(panel: Any, rows: list[dict[str, Any]]) -> None:
    """The median of each latency, with a line up to its highest percentile."""
    shown = [name for name in _LATENCIES if rows[0].get(f"median_{name}_ms") is not None]
    places = np.arange(len(shown))
    for number, (row, shade) in enumerate(zip(rows, colours(rows), strict=True)):
        offset = (number - (len(rows) - 1) / 2) * 0.8 / len(rows)
        medians = np.array([row[f"median_{name}_ms"] or np.nan for name in shown])
        highest = np.array([_highest(row, name) for name in shown])
        panel.bar(places + offset, medians, 0.75 / len(rows), color=shade, label=row["name"])
        panel.vlines(places + offset, medians, highest, color=shade, linewidth=1)
    panel.set_xticks(places, [name.upper() for name in shown])
    panel.set(yscale="log", ylabel="ms", title="latencies: median, line to the highest percentile")
    panel.legend(loc="best", frameon=False, fontsize=8)


def _highest(row: dict[str, Any], name: str) -> float:
    found = {float(key[1 : key.index("_")]): value for key, value in row.items() if _is_percentile(key, name)}
    return (found[max(found)] if found else None) or np.nan


def _is_percentile(key: str, name: str) -> bool:
    return key.startswith("p") and key.endswith(f"_{name}_ms")
