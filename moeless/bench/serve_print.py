"""The tables that `moeless bench serve` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_BUSY_CLIENT = 0.8
"""Share of a core above which the client's own work may be what is measured."""

_COUNTS = (
    ("completed / failed", lambda r: f"{r['completed']} / {r['failed']}"),
    ("duration, s", lambda r: f"{r['duration']:.2f}"),
    ("input / output tokens", lambda r: f"{r['total_input_tokens']:,} / {r['total_output_tokens']:,}"),
    ("requests a second", lambda r: f"{r['request_throughput']:.3f}"),
    ("output tokens a second", lambda r: f"{r['output_throughput']:.1f}"),
    ("all tokens a second", lambda r: f"{r['total_token_throughput']:.1f}"),
    ("good requests a second", lambda r: _number(r["request_goodput"], 3)),
    ("most requests at once", lambda r: str(r["max_concurrent_requests"])),
    ("same text as the first", lambda r: "-" if r["same_text"] is None else f"{r['same_text']:.1%}"),
)
_EXPERTS = (
    ("max/mean rank load", "balancedness", 3),
    ("same, had experts been static", "balancedness_static", 3),
    ("CV of expert loads", "cv_before", 3),
    ("CV over replicas", "cv_after_scaling", 3),
    ("replicas a layer", "replicas_per_layer", 1),
    ("expert layer, ms", "layer_forward_ms", 3),
    ("wait for slowest rank, ms", "straggler_ms", 3),
    ("billed GB·s", "billed_gb_s", 3),
    ("resident GB·s", "resident_gb_s", 3),
    ("warm starts", "warm", 0),
    ("cold starts", "cold", 0),
    ("late replicas", "late", 0),
    ("bytes moved", "bytes_moved", 0),
)


def print_bench_serve(result: dict[str, Any]) -> None:
    """Print one column a run."""
    console, load, rows = Console(), result["load"], result["runs"]
    cut = f", {load['cut_to_context']} cut to the context length" if load["cut_to_context"] else ""
    console.print(
        f"[bold]live[/bold]: {load['num_requests']} requests of {load['source']} over {load['last_due_s']:.1f} s; mean "
        f"lengths asked for: prompt {load['mean_prompt_tokens']:.0f}, output {load['mean_output_tokens']:.0f}{cut}",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for row in rows:
        table.add_column(row["name"], justify="right")
    for title, show in _COUNTS:
        _add(table, title, [show(row) for row in rows])
    table.add_section()
    for key in rows[0]:
        if key.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms")):
            statistic, metric, _ = key.split("_")
            _add(table, f"{metric.upper()} {statistic}, ms", [_number(row[key], 2) for row in rows])
    table.add_section()
    for title, key, digits in _EXPERTS:
        _add(table, title, [_number((row["moe"] or {}).get(key), digits) for row in rows])
    console.print(table)
    for row in rows:
        for line in _remarks(row):
            console.print(f"{row['name']}: {line}", style="yellow", highlight=False)


def _remarks(row: dict[str, Any]) -> list[str]:
    remarks = [f"{count} failed: {reason}" for reason, count in row["errors"].items()]
    if row["client_cpu_share"] > _BUSY_CLIENT:
        remarks.append(
            f"the client itself was busy {row['client_cpu_share']:.0%} of the time; latencies may be its own"
        )
    if row["moe"] is None:
        remarks.append("no expert metrics: this server exports none")
    return remarks


def _add(table: Table, title: str, values: list[str]) -> None:
    """A row, left out where no run has a number."""
    if any(value != "-" for value in values):
        table.add_row(title, *values)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
