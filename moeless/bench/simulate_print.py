"""The tables that `moeless bench simulate` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_simulate(result: dict[str, Any]) -> None:
    """Print the comparison, the sweeps and the verdict."""
    console = Console()
    routes, machine = result["routes"], result["machine"]
    console.print(
        f"[bold]simulated[/bold], not measured: {routes['name']}, {routes['workload']}; "
        f"{routes['iterations']} iterations of {routes['tokens_per_iteration']:g} tokens, {routes['layers']} layers x {routes['experts']} experts on "
        f"{machine['ranks']} ranks, {machine['slots_per_layer']} slots a layer",
        highlight=False,
    )
    console.print(
        f"expert loads: CV {routes['expert_cv']:.2f}, max/mean {routes['expert_max_over_mean']:.2f}; "
        f"one expert: {machine['expert_bytes'] / 1e6:.1f} MB, copied in {machine['copy_us'] / 1e3:.2f} ms",
        highlight=False,
    )
    console.print(_main_table(result["balancers"]))
    for sweep in dict.fromkeys(point["sweep"] for point in result["sweeps"]):
        console.print(_sweep_table(sweep, [point for point in result["sweeps"] if point["sweep"] == sweep]))
    if "switch" in result:
        console.print(_switch_line(result["switch"]), highlight=False)
    for note in result["notes"]:
        console.print(f"note: {note}", style="dim", highlight=False)
    found = result["verdict"]
    style = "bold green" if found["worth_it"] else "bold yellow"
    console.print(f"verdict: {found['reason']}", style=style, highlight=False)
    if "prediction_reason" in found:
        console.print(found["prediction_reason"], highlight=False)


def _main_table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("balancer", no_wrap=True)
    for name in (
        "max/mean",
        "layer ms",
        "p99",
        "gap closed",
        "replicas",
        "billed",
        "resident",
        "MB/iter",
        "cold",
        "late %",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        starts = row["warm"] + row["late"]
        table.add_row(
            row["name"] + (" (lossy)" if row["lossy"] else ""),
            f"{row['max_over_mean']:.3f}",
            f"{row['layer_ms']['mean']:.4f}",
            f"{row['layer_ms']['p99']:.4f}",
            "-" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}",
            f"{row['replicas_mean']:.1f}",
            f"{row['billed_gb_s']:.3g}",
            f"{row['resident_gb_s']:.3g}",
            f"{row['bytes_moved_per_iteration'] / 1e6:.1f}",
            str(row["cold"]),
            f"{100 * row['late'] / starts:.1f}" if starts else "-",
        )
    table.caption = "billed, resident: GB·s; MB/iter after warm-up; late: wanted replicas not there in time"
    return table


def _sweep_table(sweep: str, points: list[dict[str, Any]]) -> Table:
    """Mean layer time of every balancer, and the replicas of the paper's, by the swept value."""
    table = Table(title="layer ms (replicas a layer) by " + sweep)
    if sweep == "ablation":
        for name in ("variant", "layer ms", "max/mean", "replicas"):
            table.add_column(name, justify="left" if name == "variant" else "right")
        for row in points[0]["balancers"]:
            numbers = (f"{row['layer_ms']:.4f}", f"{row['max_over_mean']:.3f}", f"{row['replicas_mean']:.1f}")
            table.add_row(row["name"], *numbers)
        return table
    table.add_column(sweep)
    for row in points[0]["balancers"]:
        table.add_column(row["name"], justify="right")
    for point in points:
        cells = [f"{row['layer_ms']:.4f} ({row['replicas_mean']:.1f})" for row in point["balancers"]]
        table.add_row(str(point["value"]), *cells)
    return table


def _switch_line(switch: dict[str, Any]) -> str:
    parts = [f"{name} {'never' if n is None else n}" for name, n in switch["settled_after"].items()]
    return (
        f"traffic switches at iteration {switch['iteration']}; iterations until within 2 % of the final level: "
        + ", ".join(parts)
    )
