"""The report's own pictures, and which result has which: everything is drawn anew from the result file alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moeless.bench.figures import Figures, colours, draw_cdf

Result = dict[str, Any]


def draw_result(result: Result, folder: Path) -> list[Path]:
    """Write the pictures of a result to `folder`; none for a schema without any."""
    draw = _DRAWERS.get(str(result["schema"]))
    if draw is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return draw(result, folder)


def _draw_profile(result: Result, folder: Path) -> list[Path]:
    from moeless.train.profile_report import draw_profile

    return [Path(path) for path in draw_profile(result, folder)]


def _draw_simulate(result: Result, folder: Path) -> list[Path]:
    from moeless.bench.simulate_plots import draw_simulate

    return draw_simulate(result, folder)


def _draw_finetune(result: Result, folder: Path) -> list[Path]:
    """Accuracy before and after, layer by layer, one panel a distance."""
    figures = Figures(folder)
    rows = [row for row in result["layers"] if row["before"] is not None]
    if not rows:
        return []
    distances = sorted({row["distance"] for row in rows})
    figure, panels = figures.new(len(distances), width=max(6.0, 4.5 * len(distances)))
    for panel, distance in zip(panels, distances, strict=True):
        chosen = sorted((r for r in rows if r["distance"] == distance), key=lambda r: int(r["target_layer"]))
        layers = [row["target_layer"] for row in chosen]
        panel.plot(layers, [row["before"] for row in chosen], "o--", color="tab:gray", label="before")
        panel.plot(layers, [row["after"] for row in chosen], "o-", color="tab:blue", label="after")
        panel.axhline(result["threshold"], color="tab:red", linestyle=":", label="threshold h")
        panel.set(title=f"d = {distance}", xlabel="target layer", ylabel=result["metric"], ylim=(0, 1.02))
    panels[0].legend(loc="best", frameon=False)
    figures.save(figure, "accuracy.png")
    return figures.written


def _draw_layers(result: Result, folder: Path) -> list[Path]:
    """Distribution of measured layer times, the stages they are made of, and the cost model's word beside them."""
    figures, rows = Figures(folder), result.get("balancers", [])
    if not rows:
        return []
    draw_cdf(figures, rows, "layer_cdf.png", "layer time (measured)")
    figure, (stages, models) = figures.new(2, width=11)
    names, left = [row["name"] for row in rows], np.zeros(len(rows))
    for stage in ("exchange_ms", "plan_ms", "dispatch_ms", "compute_ms", "combine_ms"):
        values = np.array([row[stage] for row in rows])
        stages.barh(names, values, left=left, label=stage.removesuffix("_ms"))
        left += values
    stages.set(xlabel="ms", title="stages of the slowest rank (measured)")
    stages.legend(frameon=False, fontsize=8, ncol=5, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for row, colour in zip(rows, colours(rows), strict=True):
        models.plot(row["modelled_layer_ms"], row["layer_ms"]["mean"], "o", color=colour, label=row["name"])
    models.set(xlabel="modelled layer ms", ylabel="measured layer ms", title="cost model and clock")
    models.set_xlim(0, 1.1 * max(row["modelled_layer_ms"] for row in rows))
    models.set_ylim(0, 1.1 * max(row["layer_ms"]["mean"] for row in rows))
    models.legend(loc="best", frameon=False, fontsize=8)
    stages.invert_yaxis()
    figures.save(figure, "stages.png")
    return figures.written


def _draw_predictors(result: Result, folder: Path) -> list[Path]:
    from moeless.bench.predictors_report import draw_predictors

    return [Path(path) for path in draw_predictors(result, folder)]


def _draw_serve(result: Result, folder: Path) -> list[Path]:
    from moeless.bench.serve_plots import draw_serve

    return draw_serve(result, folder)


_DRAWERS: dict[str, Callable[[Result, Path], list[Path]]] = {
    "moeless.profile/1": _draw_profile,
    "moeless.finetune/1": _draw_finetune,
    "moeless.bench.predictors/1": _draw_predictors,
    "moeless.simulate/1": _draw_simulate,
    "moeless.layers/1": _draw_layers,
    "moeless.bench-serve/1": _draw_serve,
}
