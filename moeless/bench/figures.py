"""Drawing with matplotlib: one look, files written whole, no window ever opened.

Legends name their place, even "best": by default, matplotlib warns when its search takes long on a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeless.files import replacing

_COLOURS = {
    "static": "tab:gray",
    "eplb": "tab:orange",
    "metro": "tab:brown",
    "oracle": "tab:pink",
    "bound": "tab:green",
    "moeless": "tab:blue",
    "moeless-roofline": "tab:red",
}


@dataclass(slots=True)
class Figures:
    """Makes figures and writes them to one folder."""

    out: Path
    written: list[Path] = field(default_factory=list)

    def new(self, num_panels: int, *, width: float, stacked: bool = False) -> tuple[Any, list[Any]]:
        """A figure `width` inches wide and its panels, side by side or stacked."""
        from matplotlib.figure import Figure

        rows, columns = (num_panels, 1) if stacked else (1, num_panels)
        figure = Figure(figsize=(width, 2.8 * rows + 1.0), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=stacked, squeeze=False).ravel().tolist()
        for panel in panels:
            panel.spines[["top", "right"]].set_visible(False)
        return figure, panels

    def save(self, figure: Any, name: str) -> None:
        """Write a PNG."""
        path = self.out / name
        with replacing(path) as partial:
            figure.savefig(partial, format="png", dpi=110)
        self.written.append(path)


def colours(rows: list[dict[str, Any]]) -> list[str]:
    """One colour a row: the same for a balancer in every picture, others from the cycle."""
    return [_COLOURS.get(row["name"], f"C{i}") for i, row in enumerate(rows)]


def draw_cdf(figures: Figures, rows: list[dict[str, Any]], name: str, title: str) -> None:
    """Distribution of layer times, one line a row of `name` and `layer_ms_cdf` (101 quantiles); references dashed."""
    figure, (axes,) = figures.new(1, width=7)
    shares = np.linspace(0, 1, 101)
    for row, colour in zip(rows, colours(rows), strict=True):
        style = "--" if row["name"] in ("oracle", "bound") else "-"
        axes.plot(1e3 * np.array(row["layer_ms_cdf"]), shares, style, color=colour, label=row["name"])
    slow = max(row["layer_ms_cdf"][99] for row in rows)
    axes.set(xlabel="MoE layer time, us", ylabel="share of layers", title=title, xlim=(0, 1.05e3 * slow), ylim=(0, 1))
    axes.legend(loc="best", frameon=False)
    figures.save(figure, name)
