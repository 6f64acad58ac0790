"""The tables that `moeless bench simulate` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from moeless.tables import compact_table

_MOVED = "bytes_moved_per_iteration"


def print_simulate(result: dict[str, Any]) -> None:
    """Print the comparison, the sweeps and the verdict."""
    console = Console()
    routes, machine = result["routes"], result["machine"]
    sizes = f"{routes['layers']} layers x {routes['experts']} experts on {machine['ranks']} ranks"
    console.print(
        f"[bold]simulated[/bold], not measured: {routes['name']}, {routes['workload']}; "
        f"{routes['iterations']} iterations of {routes['tokens_per_iteration']:g} tokens, {sizes}, "
        f"{machine['slots_per_layer']} slots a layer",
        highlight=False,
    )
    console.print(
        f"expert loads: CV {routes['expert_cv']:.2f}, max/mean {routes['expert_max_over_mean']:.2f}; "
        f"one expert: {machine['expert_bytes'] / 1e6:.1f} MB, copied in {machine['copy_us'] / 1e3:.2f} ms",
        highlight=False,
    )
    console.print(_time_table(result["balancers"]))
    console.print(_cost_table(result["balancers"]))
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


def _time_table(rows: list[dict[str, Any]]) -> Table:
    table = compact_table("balancer", "max/mean", "CV", "layer us", "p99", "x bound", "gap closed")
    for row in rows:
        times = [f"{1e3 * row['layer_ms'][key]:.1f}" for key in ("mean", "p99")]
        gap = "-" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
        name = row["name"] + (" (lossy)" if row["lossy"] else "")
        bound = f"{row['time_over_bound']:.3f}"
        balance = (f"{row['max_over_mean']:.3f}", f"{row['replica_cv']:.2f}")
        table.add_row(name, *balance, *times, bound, gap)
    table.caption = "max/mean: of rank loads; CV: of replica loads; bound: single launches, perfectly divided"
    return table


def _cost_table(rows: list[dict[str, Any]]) -> Table:
    table = compact_table("balancer", "replicas", "billed GB·s", "resident GB·s", "MB/iter", "last 1/4", "cold", "late")
    for row in rows:
        cost = (f"{row['replicas_mean']:.1f}", f"{row['billed_gb_s']:.3g}", f"{row['resident_gb_s']:.3g}")
        moved = [f"{row[key] / 1e6:,.{0 if row[key] >= 1e8 else 1}f}" for key in (_MOVED, _MOVED + "_last_quarter")]
        table.add_row(row["name"], *cost, *moved, *(str(row[key]) for key in ("cold", "late")))
    table.caption = (
        "billed: a layer's live replicas x that layer's time; resident: everything in memory x wall time; "
        "late: wanted replicas that were not there in time"
    )
    return table


def _sweep_table(sweep: str, points: list[dict[str, Any]]) -> Table:
    """Mean layer time of every balancer by the swept value, with the replicas where these are the point."""
    if sweep == "ablation":
        table = compact_table("variant", "layer us", "max/mean", "replicas")
        for row in points[0]["balancers"]:
            numbers = (f"{1e3 * row['layer_ms']:.1f}", f"{row['max_over_mean']:.3f}", f"{row['replicas_mean']:.1f}")
            table.add_row(row["name"], *numbers)
        return table
    with_replicas = sweep == "cv-threshold"
    table = compact_table(sweep, *(row["name"] for row in points[0]["balancers"]))
    table.title = f"layer us by {sweep}" + (" (replicas a layer)" if with_replicas else "")
    for point in points:
        cells = []
        for row in point["balancers"]:
            replicas = f" ({row['replicas_mean']:.1f})" if with_replicas else ""
            cells.append(f"{1e3 * row['layer_ms']:.1f}{replicas}")
        table.add_row(str(point["value"]), *cells)
    return table


def _switch_line(switch: dict[str, Any]) -> str:
    parts = [f"{name} {'never' if n is None else n}" for name, n in switch["settled_after"].items()]
    return (
        f"traffic switches at iteration {switch['iteration']}; iterations until within 2 % of the final level: "
        + ", ".join(parts)
    )
