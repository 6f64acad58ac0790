"""The tables that `moeless bench layers` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from moeless.tables import compact_table


def print_layers(result: dict[str, Any]) -> None:
    """Print the comparison, or what a calibration found."""
    console = Console()
    found = result["calibration"]
    if "balancers" in result:
        routes = result["routes"]
        console.print(
            f"[bold]live[/bold]: {routes['name']}, {result['config']['ep']} ranks, "
            f"{routes['tokens_per_iteration']} tokens an iteration, top-{routes['top_k']} of {routes['experts']} "
            f"experts, {routes['slots_per_layer']} slots a layer; clock: {result['clock']}",
            highlight=False,
        )
        console.print(_times(result["balancers"]))
        console.print(_stages(result["balancers"]))
    else:
        console.print(f"[bold]live[/bold] calibration by {result['clock']}", highlight=False)
    console.print(
        f"one expert: {found['expert_bytes'] / 1e6:.1f} MB, floor {found['floor_us']:.1f} us, "
        f"{found['alpha_us']:.2f} us a token; {found['beta_us']:.3f} us a token sent and back, "
        f"{found['latency_us']:.0f} us for two all-to-alls; loaded at {found['copy_bytes_per_s'] / 1e9:.2f} GB/s, "
        f"{found['cold_start_over_memcpy']:.2f}x the time of a memcpy",
        highlight=False,
    )
    if "verdict" in result:
        style = "bold green" if result["verdict"]["worth_it"] else "bold yellow"
        reason = result["verdict"]["reason"].replace("iteration", "layer")
        console.print(f"verdict: {reason}", style=style, highlight=False)
    if "written" in result:
        console.print(f"written: {result['written']}", highlight=False)


def _times(rows: list[dict[str, Any]]) -> Table:
    table = compact_table("balancer", "max/mean", "layer ms", "p50", "p99", "x static", "gap", "modelled")
    for row in rows:
        gap = "-" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
        times = [f"{row['layer_ms'][key]:.2f}" for key in ("mean", "p50", "p99")]
        name = row["name"] + (" (lossy)" if row["lossy"] else "")
        modelled = f"{row['modelled_layer_ms']:.2f}"
        table.add_row(name, f"{row['max_over_mean']:.3f}", *times, f"{row['over_static']:.3f}", gap, modelled)
    table.caption = (
        "bound: planned and split from the truth, copies free; gap: share closed of static's to it; modelled: ms"
    )
    return table


def _stages(rows: list[dict[str, Any]]) -> Table:
    stages = ("exchange_ms", "plan_ms", "dispatch_ms", "compute_ms", "combine_ms", "wait_ms")
    heads = ("exch", "plan", "disp", "comp", "comb", "wait")
    table = compact_table("balancer", *heads, "MB", "warm", "cold", "late")
    for row in rows:
        counts = [str(row[key]) for key in ("warm", "cold", "late")]
        moved = f"{row['bytes_moved'] / 1e6:,.0f}"
        table.add_row(row["name"], *(f"{row[stage]:.1f}" for stage in stages), moved, *counts)
    table.caption = (
        "exchange, plan, dispatch, compute, combine: stages of the slowest rank, ms; wait: its compute less the "
        "fastest rank's; MB: moved"
    )
    return table
