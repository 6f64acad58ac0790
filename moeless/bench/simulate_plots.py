"""Pictures of a simulation: Figures 8-10 and 13-17 of the paper, drawn from `simulate.json` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moeless.bench.figures import Figures, colours, draw_cdf

_SMOOTHED = 4


def draw_simulate(result: dict[str, Any], out: Path) -> list[Path]:
    """Write PNGs to `out` and return their paths."""
    figures = Figures(out)
    rows = result["balancers"]
    draw_cdf(figures, rows, "layer_cdf.png", "layer time (simulated)")
    _draw_bars(figures, rows)
    _draw_timeline(figures, result)
    for sweep in dict.fromkeys(point["sweep"] for point in result["sweeps"]):
        points = [point for point in result["sweeps"] if point["sweep"] == sweep]
        if sweep == "ablation":
            draw_cdf(figures, points[0]["balancers"], "ablation.png", "ablation of the paper's method (simulated)")
        elif sweep == "batch":
            _draw_batch(figures, points)
        elif sweep == "cost":
            _draw_costs(figures, points)
        else:
            _draw_sweep(figures, sweep, points)
    return figures.written


def _draw_bars(figures: Figures, rows: list[dict[str, Any]]) -> None:
    panels = {
        "max/mean rank load": lambda row: row["max_over_mean"],
        "replicas a layer": lambda row: row["replicas_mean"],
        "billed GB·s": lambda row: row["billed_gb_s"],
        "resident GB·s": lambda row: row["resident_gb_s"],
    }
    figure, axes = figures.new(len(panels), width=14)
    names = [row["name"] for row in rows]
    for panel, (title, value) in zip(axes, panels.items(), strict=True):
        values = [value(row) for row in rows]
        bars = panel.barh(names, values, color=colours(rows))
        panel.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        panel.set(title=title, xlim=(0, 1.2 * max(values)))
        panel.invert_yaxis()
        if panel is not axes[0]:
            panel.set_yticks([])
    figures.save(figure, "comparison.png")


def _draw_timeline(figures: Figures, result: dict[str, Any]) -> None:
    """Time over the bound, and bytes moved, iteration by iteration: warm-up, steady state, and what a switch does."""
    rows = [row for row in result["balancers"] if row["name"] not in ("oracle", "bound")]
    figure, (above, below) = figures.new(2, width=9, stacked=True)
    for row, colour in zip(rows, colours(rows), strict=True):
        for panel, key, scale in ((above, "time_over_bound", 1.0), (below, "bytes_moved", 1e-6)):
            values = scale * np.array(row["timeline"][key])
            window = min(_SMOOTHED, len(values))
            smooth = np.convolve(values, np.ones(window) / window, mode="valid")
            panel.plot(np.arange(len(smooth)) + window - 1, smooth, color=colour, label=row["name"], linewidth=1)
    above.set(ylabel="time / bound", title=f"iteration by iteration, mean of {_SMOOTHED} (simulated)")
    below.set(xlabel="iteration", ylabel="MB moved an iteration", yscale="symlog")
    if "switch" in result:
        for panel in (above, below):
            panel.axvline(result["switch"]["iteration"], color="0.5", linestyle=":", label="traffic switches")
    above.legend(loc="best", frameon=False, ncol=3, fontsize=8)
    figures.save(figure, "timeline.png")


def _draw_sweep(figures: Figures, sweep: str, points: list[dict[str, Any]]) -> None:
    figure, (times, counts) = figures.new(2, width=10)
    values = [point["value"] for point in points]
    for name, colour in _names(points):
        rows = [_row(point, name) for point in points]
        times.plot(values, [1e3 * row["layer_ms"] for row in rows], "o-", color=colour, label=name)
        counts.plot(values, [row["replicas_mean"] for row in rows], "o-", color=colour)
    times.set(xlabel=sweep, ylabel="mean layer time, us", title=f"sensitivity to {sweep} (simulated)")
    counts.set(xlabel=sweep, ylabel="replicas a layer")
    times.legend(loc="best", frameon=False, fontsize=8)
    figures.save(figure, f"sweep_{sweep.replace('-', '_')}.png")


def _draw_batch(figures: Figures, points: list[dict[str, Any]]) -> None:
    """Layer time against static's, by tokens an iteration: below 1 replication pays, above 1 it hurts."""
    figure, (axes,) = figures.new(1, width=8)
    tokens = [point["value"] for point in points]
    for name, colour in _names(points):
        ratios = [_row(point, name)["layer_ms"] / _row(point, "static")["layer_ms"] for point in points]
        axes.plot(tokens, ratios, "o--" if name in ("oracle", "bound") else "o-", color=colour, label=name)
    low, high = axes.get_ylim()
    axes.axhspan(1, max(high, 1.05), color="tab:red", alpha=0.07)
    axes.axhspan(min(low, 0.95), 1, color="tab:green", alpha=0.07)
    axes.set(ylim=(min(low, 0.95), max(high, 1.05)), xscale="log", xticks=tokens, xticklabels=tokens)
    axes.minorticks_off()
    axes.tick_params(axis="x", rotation=45)
    axes.text(0.01, 0.98, "slower than static", transform=axes.transAxes, va="top", color="tab:red")
    axes.text(0.01, 0.02, "faster than static", transform=axes.transAxes, color="tab:green")
    axes.set(xlabel="tokens an iteration", ylabel="layer time / static's", title="where replication pays (simulated)")
    axes.legend(loc="best", frameon=False, fontsize=8)
    figures.save(figure, "sweep_batch.png")


def _draw_costs(figures: Figures, points: list[dict[str, Any]]) -> None:
    """The paper's linear cost model and the roofline side by side."""
    figure, axes = figures.new(len(points), width=11)
    for panel, point in zip(axes, points, strict=True):
        rows = point["balancers"]
        bars = panel.barh([row["name"] for row in rows], [1e3 * row["layer_ms"] for row in rows], color=colours(rows))
        panel.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        panel.set(title=f"{point['value']} cost (simulated)", xlabel="mean layer time, us")
        panel.invert_yaxis()
    figures.save(figure, "sweep_cost.png")


def _names(points: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    rows = points[0]["balancers"]
    return [(row["name"], colour) for row, colour in zip(rows, colours(rows), strict=True)]


def _row(point: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in point["balancers"] if row["name"] == name)
    return found
