"""What `moeless bench predictors` shows: tables on the terminal, the paper's figures as PNG, from the result alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moeless.tables import compact_table

Result = dict[str, Any]


def print_predictors(result: Result) -> None:
    """Mean accuracy by predictor and distance, layers before and after, the two sources side by side."""
    from rich.console import Console

    console = Console()
    tokens = result["num_tokens"]
    console.print(
        f"[bold]{result['model']['name']}[/bold]: {tokens['train']:,} tokens to train, {tokens['select']:,} to select, "
        f"judged on {tokens['test']:,} tokens of other documents; {result['num_threads']} thread(s)"
    )
    for table in (_recall_table(result), _cost_table(result), _layer_table(result)):
        console.print(table)
    if (sources := _source_table(result)) is not None:
        console.print(sources)
    console.print(f"Written: {', '.join([result['config']['out'] + '/predictors.json', *result['pictures']])}")


def _recall_table(result: Result) -> Any:
    """Token recall of every predictor by distance."""
    from rich.table import Table

    means = {(row["predictor"], row["distance"]): row["token_recall"] for row in result["rows"]}
    distances = sorted({distance for _, distance in means})
    table = Table(
        title="token recall, mean over layers",
        caption="d=0: the layer's own input before its attention, all layers; other distances: layers from d on",
    )
    table.add_column("predictor")
    for distance in distances:
        table.add_column(f"d={distance}", justify="right")
    for name in dict.fromkeys(name for name, _ in means):
        table.add_row(name, *(f"{means[name, d]:.3f}" if (name, d) in means else "-" for d in distances))
    return table


def _cost_table(result: Result) -> Any:
    """The other metrics at the smallest distance, size, and time to train and to predict."""
    from rich.table import Table

    nearest = _distances(result)[0]
    table = Table(
        title=f"d={nearest}: all layers together; prediction time of one layer, median",
        caption="load: load accuracy; stragglers: straggler recall; r: Pearson's r of load shares",
    )
    right = ("load", "stragglers", "r", "kB", "fit s", "us @64", "@1024")
    for name in ("predictor", *right):
        table.add_column(name, justify="right" if name in right else "left")
    for row in (r for r in result["rows"] if r["distance"] == nearest):
        timing = row["predict_us"] or {}
        table.add_row(
            row["predictor"],
            *(f"{row[m]:.3f}" for m in ("load_accuracy", "straggler_recall")),
            "-" if row["pearson"] is None else f"{row['pearson']:.3f}",
            f"{row['bytes'] / 1e3:,.0f}",
            f"{row['fit_seconds']:.1f}",
            *(f"{timing[b]:.0f}" if b in timing else "-" for b in ("64", "1024")),
        )
    return table


def _by_layer(result: Result, distance: int) -> dict[tuple[str, int], float]:
    """Token recall by (predictor, target layer) at one distance."""
    rows = (row for row in result["layers"] if row["distance"] == distance)
    return {(row["predictor"], row["target_layer"]): row["token_recall"] for row in rows}


def _distances(result: Result) -> list[int]:
    return sorted({row["distance"] for row in result["layers"] if row["distance"]})


def _layer_table(result: Result) -> Any:
    distances = _distances(result)
    table = compact_table(
        "layer", *(f"d={d}" for d in distances), title="token recall by layer: the untouched gate, and tuned"
    )
    recalls = {d: _by_layer(result, d) for d in distances}
    for layer in sorted({row["target_layer"] for row in result["layers"] if row["distance"]}):
        cells = []
        for distance in distances:
            gate, tuned = (recalls[distance].get((name, layer)) for name in ("gate", "tuned"))
            shown = [f"{value:.3f}" for value in (gate, tuned) if value is not None]
            cells.append("→".join(shown) or "-")
        table.add_row(str(layer), *cells)
    return table


def _source_table(result: Result) -> Any | None:
    """Pre-attention against gate-input at the smallest distance, tuned; None where either was not measured."""
    from rich.table import Table

    nearest = _distances(result)[0]
    near, own = _by_layer(result, nearest), _by_layer(result, 0)
    layers = sorted(layer for name, layer in own if name == "tuned")
    if not layers:
        return None
    best = {layer: max(own["tuned", layer], near.get(("tuned", layer), 0.0)) for layer in layers}
    table = Table(
        title=f"token recall by source, tuned: gate-input at d={nearest} against pre-attention",
        caption=f"mean over all layers with the better source of each: {np.mean(list(best.values())):.3f}",
    )
    for name in ("layer", "gate-input", "pre-attention", "better"):
        table.add_column(name, justify="right")
    for layer in layers:
        gate_input = near.get(("tuned", layer))
        better = "pre-attention" if gate_input is None or own["tuned", layer] > gate_input else "gate-input"
        shown = "-" if gate_input is None else f"{gate_input:.3f}"
        table.add_row(str(layer), shown, f"{own['tuned', layer]:.3f}", better)
    return table


def draw_predictors(result: Result, folder: Path) -> list[str]:
    """The pictures; gives the paths written."""
    from matplotlib.figure import Figure

    pictures: dict[str, Figure] = {
        "layers": _draw_layers(result),
        "distances": _draw_distances(result),
        "sizes": _draw_sizes(result),
    }
    for density in result["density"]:
        if density["predictor"] == "tuned" and density["distance"] == _distances(result)[0]:
            pictures["density"] = _draw_density(result, density)
    paths = []
    for name, figure in pictures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(str(path))
    return paths


def _draw_layers(result: Result) -> Any:
    """Similarity of router inputs, accuracy of the gate, and accuracy after tuning, by layer (figure 6)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    similarity, before, after = figure.subplots(1, 3, sharex=True, sharey=True)
    for distance in _distances(result):
        cosines = [(r["target_layer"], r["cosine"]) for r in result["similarity"] if r["distance"] == distance]
        recalls = _by_layer(result, distance)
        similarity.plot(*zip(*cosines, strict=True), marker="o", markersize=3, label=f"d={distance}")
        for axes, wanted in ((before, "gate"), (after, "tuned")):
            points = [(layer, recall) for (name, layer), recall in recalls.items() if name == wanted]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"d={distance}")
    titles = ("cosine similarity of router inputs", "token recall: untouched gate", "token recall: tuned")
    for axes, title in zip((similarity, before, after), titles, strict=True):
        axes.set(title=title, xlabel="MoE layer", ylim=(0, 1))
        axes.grid(alpha=0.3)
    similarity.legend()
    return figure


def _draw_distances(result: Result) -> Any:
    """Mean accuracy of every predictor by distance (figures 7 and 11)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["predictor"] for row in result["rows"]):
        rows = sorted((r["distance"], r["token_recall"]) for r in result["rows"] if r["predictor"] == name)
        points = [point for point in rows if point[0]]
        if points and name != "actual":
            axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == "tuned" else 1.2)
    axes.set(title="token recall, mean over layers", xlabel="distance d", xticks=_distances(result))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _draw_sizes(result: Result) -> Any:
    """Bytes of all layers' predictors at the smallest distance (table 2)."""
    from matplotlib.figure import Figure

    nearest = _distances(result)[0]
    rows = [r for r in result["rows"] if r["distance"] == nearest and r["bytes"]]
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([r["predictor"] for r in rows], [r["bytes"] for r in rows])
    axes.bar_label(bars, [f"{r['bytes']:,}" for r in rows], padding=3, fontsize=8)
    axes.set(title=f"bytes of all layers' predictors, d={nearest}", xscale="log")
    axes.margins(x=0.3)
    return figure


def _draw_density(result: Result, density: dict[str, Any]) -> Any:
    """Predicted against actual loads of all layers, experts and iterations (figure 12)."""
    from matplotlib.figure import Figure

    key = (density["predictor"], density["distance"])
    r = next(row["pearson"] for row in result["rows"] if (row["predictor"], row["distance"]) == key)
    figure = Figure(figsize=(4.6, 4), layout="constrained")
    axes = figure.subplots()
    counts = np.log1p(np.array(density["counts"]).T)
    axes.imshow(counts, origin="lower", extent=(0, 4, 0, 4), cmap="viridis")
    axes.plot([0, 4], [0, 4], color="white", linewidth=0.8)
    shown = "-" if r is None else f"{r:.3f}"
    axes.set(
        title=f"expert loads over the fair share, d={key[1]}\nPearson r = {shown}", xlabel="predicted", ylabel="actual"
    )
    return figure
