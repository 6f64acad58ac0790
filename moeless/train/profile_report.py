"""What `moeless profile` shows: result rows, tables on the terminal, heat maps as PNG.

Tables and pictures are made from the result alone, so they can be made again from `profile.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moeless.train.profiler import Profiler
from moeless.train.rows import PHASE_NAMES

Row = dict[str, Any]


def build_result(profiler: Profiler, metric: str, threshold: float) -> dict[str, Any]:
    """The measured part of the result file; see README for the keys.

    A target layer is below the threshold at a distance when `gate`'s `metric`, over both phases by tokens, is.
    """
    phases = [phase for phase in (0, 1) if profiler.num_tokens[phase]]
    layers = range(len(profiler.points))
    rows = [row for key in sorted(profiler.scores) if (row := _row(profiler, key))]
    load = []
    for phase in phases:
        for layer in layers:
            cv, skew = profiler.balance(phase, layer)
            totals = profiler.loads(phase, layer).sum(0)
            load.append(
                {
                    "layer": layer,
                    "phase": PHASE_NAMES[phase],
                    "cv": cv,
                    "max_over_mean": skew,
                    "expert_tokens": totals.tolist(),
                    "num_iterations": len(profiler.loads(phase, layer)),
                }
            )
    return {
        "num_tokens": {PHASE_NAMES[p]: profiler.num_tokens[p] for p in (0, 1)},
        "metric": metric,
        "threshold": threshold,
        "rows": rows,
        "pearson": [
            {
                "predictor": name,
                "distance": None if name == "history" else distance,
                "phase": PHASE_NAMES[phase],
                "r": score.r(),
            }
            for (name, phase, distance), score in sorted(profiler.pearson.items())
        ],
        "load": load,
        "below_threshold": _below_threshold(rows, profiler, metric.replace("-", "_"), threshold),
    }


def _row(profiler: Profiler, key: tuple[str, int, int, int]) -> Row | None:
    name, phase, source, target = key
    summary = profiler.scores[key].summary()
    if summary is None:
        return None
    paired = name != "history"
    return {
        "source_layer": source if paired else None,
        "target_layer": target,
        "distance": target - source if paired else None,
        "phase": PHASE_NAMES[phase],
        "predictor": name,
        **summary,
        "cosine": profiler.cosine(phase, source, target) if paired and target > source else None,
    }


def _below_threshold(rows: list[Row], profiler: Profiler, metric: str, threshold: float) -> list[dict[str, Any]]:
    weights = dict(zip(PHASE_NAMES, profiler.num_tokens, strict=True))
    by_pair: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row["predictor"] == "gate":
            by_pair.setdefault((row["distance"], row["target_layer"]), []).append(row)
    found = []
    for (distance, target), pair in sorted(by_pair.items()):
        accuracy = np.average([r[metric] for r in pair], weights=[weights[r["phase"]] for r in pair])
        if accuracy < threshold:
            found.append({"target_layer": target, "distance": distance, "accuracy": float(accuracy)})
    return found


def print_profile(result: dict[str, Any]) -> None:
    """Tables on stdout: accuracy by layer and distance, predictors, loads, verdict."""
    from rich.console import Console

    console = Console()
    model, metric = result["model"], result["metric"].replace("-", "_")
    tokens = result["num_tokens"]
    console.print(
        f"[bold]{model['name']}[/bold] ({model['family']}, {model['num_moe_layers']} MoE layers of "
        f"{model['num_experts'][0]} experts, top-{model['top_k'][0]}) on {tokens['prefill']:,} prefill and "
        f"{tokens['decode']:,} decode tokens of {result['data']['num_documents_used']:,} documents"
    )
    for note in result["data"]["notes"]:
        console.print(f"[yellow]note:[/yellow] {note}")
    if result["data"]["num_bad_rows"]:
        named = "; ".join(result["data"]["bad_rows"])
        console.print(f"[yellow]{result['data']['num_bad_rows']:,} bad rows left out:[/yellow] {named}", markup=True)
    for phase in PHASE_NAMES:
        if tokens[phase]:
            console.print(_accuracy_table(result, metric, phase))
    console.print(_predictor_table(result))
    below = result["below_threshold"]
    names = ", ".join(f"{b['target_layer']} (d={b['distance']}: {b['accuracy']:.3f})" for b in below[:12])
    console.print(
        f"{len(below)} of {_num_pairs(result)} (layer, distance) pairs are below {result['metric']} "
        f"{result['threshold']}{': layers ' + names if below else ''}{' ...' if len(below) > 12 else ''}"
    )
    console.print(f"Written: {', '.join([str(result['config']['out']) + '/profile.json', *result['pictures']])}")


def _num_pairs(result: dict[str, Any]) -> int:
    return len({(r["distance"], r["target_layer"]) for r in result["rows"] if r["predictor"] == "gate"})


def _accuracy_table(result: dict[str, Any], metric: str, phase: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = [r for r in result["rows"] if r["phase"] == phase]
    gate = {(r["target_layer"], r["distance"]): r for r in rows if r["predictor"] == "gate"}
    history = {r["target_layer"]: r for r in rows if r["predictor"] == "history"}
    loads = {r["layer"]: r for r in result["load"] if r["phase"] == phase}
    distances = sorted({d for _, d in gate})
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{phase}: {metric} of each layer's router on the router input d layers before",
        caption=f"history: loads of the iterations before; cosine: of router inputs at d={distances[0]}; "
        "CV and max/mean: of expert loads, mean over iterations",
    )
    table.add_column("layer", justify="right")
    for distance in distances:
        table.add_column(f"d={distance}", justify="right")
    for name in ("history", "cosine", "CV", "max/mean"):
        table.add_column(name, justify="right")
    for layer, load in loads.items():
        cells = []
        for distance in distances:
            row = gate.get((layer, distance))
            color = "red" if row and row[metric] < result["threshold"] else "green"
            cells.append(f"[{color}]{row[metric]:.3f}[/{color}]" if row else "-")
        near = gate.get((layer, distances[0]))
        cells += [
            f"{history[layer][metric]:.3f}" if layer in history else "-",
            f"{near['cosine']:.3f}" if near else "-",
            f"{load['cv']:.2f}",
            f"{load['max_over_mean']:.2f}",
        ]
        table.add_row(str(layer), *cells)
    return table


def _predictor_table(result: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="mean over layers, by predictor",
        caption="recall: token recall; exact: exact-set rate; load: load accuracy; straggler: straggler recall; "
        "r: Pearson's r of load shares",
    )
    pearson = {(p["predictor"], p["distance"], p["phase"]): p["r"] for p in result["pearson"]}
    for name in ("predictor", "d", "phase", "recall", "exact", "load", "straggler", "r"):
        table.add_column(name, justify="left" if name in ("predictor", "phase") else "right")
    for (predictor, distance, phase), r in pearson.items():
        rows = [
            row
            for row in result["rows"]
            if (row["predictor"], row["distance"], row["phase"]) == (predictor, distance, phase)
        ]
        means = [
            np.mean([row[m] for row in rows])
            for m in ("token_recall", "exact_set", "load_accuracy", "straggler_recall")
        ]
        shown = [f"{m:.3f}" for m in means] + ["-" if r is None else f"{r:.3f}"]
        table.add_row(predictor, "-" if distance is None else str(distance), phase, *shown)
    return table


def draw_profile(result: dict[str, Any], folder: Path) -> list[str]:
    """Heat maps of accuracy, similarity and loads; the paths written."""
    from matplotlib.figure import Figure

    paths = []
    for phase in (p for p in PHASE_NAMES if result["num_tokens"][p]):
        rows = [r for r in result["rows"] if r["phase"] == phase and r["predictor"] == "gate"]
        loads = [r for r in result["load"] if r["phase"] == phase]
        shares = np.array([np.array(r["expert_tokens"]) / max(1, sum(r["expert_tokens"])) for r in loads])
        metric = result["metric"].replace("-", "_")
        maps = (
            ("accuracy", f"{metric} of gate reuse", _grid(rows, metric), "distance d", (0.0, 1.0)),
            ("similarity", "cosine similarity of router inputs", _grid(rows, "cosine"), "distance d", (0.0, 1.0)),
            ("load", "tokens over the mean expert's", shares * shares.shape[1], "expert", (0.0, None)),
        )
        for name, title, grid, label, (low, high) in maps:
            figure = Figure(figsize=(3 + 0.35 * grid.shape[1], 2 + 0.3 * grid.shape[0]), layout="constrained")
            axes = figure.subplots()
            image = axes.imshow(grid, aspect="auto", vmin=low, vmax=high, cmap="viridis")
            axes.set(title=f"{title}\n({phase})", xlabel=label, ylabel="MoE layer")
            first = 1 if label.startswith("distance") else 0
            axes.set_xticks(range(grid.shape[1]), [str(x + first) for x in range(grid.shape[1])])
            axes.set_yticks(range(grid.shape[0]))
            if grid.size <= 120:
                _write_values(axes, grid, low, high)
            figure.colorbar(image)
            path = folder / f"{name}-{phase}.png"
            figure.savefig(path, dpi=120)
            paths.append(str(path))
    return paths


def _grid(rows: list[Row], key: str) -> np.ndarray:
    """[layers, distances] with NaN where there is no pair."""
    layers, distances = max(r["target_layer"] for r in rows) + 1, max(r["distance"] for r in rows)
    grid = np.full((layers, distances), np.nan)
    for row in rows:
        grid[row["target_layer"], row["distance"] - 1] = row[key]
    return grid


def _write_values(axes: Any, grid: np.ndarray, low: float, high: float | None) -> None:
    top = high if high is not None else float(np.nanmax(grid))
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = "white" if value < low + 0.6 * (top - low) else "black"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
