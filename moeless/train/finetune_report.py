"""What `moeless finetune` shows on the terminal, from the result alone."""

from __future__ import annotations

from typing import Any

from moeless.tables import compact_table

_COLORS = {"kept": "green", "tuned": "green", "tuned-below-h": "yellow", "rejected": "red", "no-source": "red"}


def print_finetune(result: dict[str, Any]) -> None:
    """A row for each predictor with its verdict, then the totals."""
    from rich.console import Console

    console = Console()
    tokens = result["num_tokens"]
    table = compact_table(
        *("layer", "d", "source", "before", "after", "verdict", "loss", "rank", "seconds"),
        left=("source", "verdict", "loss"),
        title=f"{result['metric']} on {tokens['test']:,} tokens of conversations held out from {tokens['train']:,} to "
        f"train and {tokens['select']:,} to select; threshold {result['threshold']}",
        caption="before: the layer's own router on the source; d=0: the layer's own input before its attention; "
        "rank: of the adapter",
    )
    for row in result["layers"]:
        color = _COLORS[row["verdict"]]
        table.add_row(
            str(row["target_layer"]),
            str(row["distance"]),
            row["source"],
            _number(row["before"]),
            _number(row["after"]),
            f"[{color}]{row['verdict']}[/{color}]",
            row["loss"] or "-",
            str(row["adapter_rank"]),
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    for distance, (before, after) in sorted(mean_accuracies(result["layers"]).items()):
        console.print(f"d={distance}: mean {before:.3f} before, {after:.3f} after")
    console.print(
        f"{result['num_parameters']:,} parameters, {result['bytes']:,} bytes, {result['seconds_total']:.1f} s. "
        f"Written: {', '.join(result.get('files', []))}"
    )


def mean_accuracies(layers: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """(before, after), mean over layers, by distance."""
    judged = [row for row in layers if row["before"] is not None]
    means: dict[int, tuple[float, float]] = {}
    for distance in {row["distance"] for row in judged}:
        rows = [row for row in judged if row["distance"] == distance]
        before, after = (sum(row[name] for row in rows) / len(rows) for name in ("before", "after"))
        means[distance] = before, after
    return means


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
