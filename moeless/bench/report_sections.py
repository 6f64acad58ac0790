"""What the report shows of a result file: by its schema where that is known, else whatever fits in tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeless.bench.report_html import Section, Table, format_value

Result = dict[str, Any]

# Keys that every result file has (see moeless.result); they go into the folded table.
_HEADER = ("schema", "source", "command", "git", "host", "versions", "config")

_MAX_TEXT = 200

_SIMULATE_COLUMNS = (
    "name",
    "lossy",
    "max_over_mean",
    "layer_ms.mean",
    "layer_ms.p99",
    "time_over_bound",
    "gap_closed",
    "replicas_mean",
    "billed_gb_s",
    "resident_gb_s",
    "bytes_moved_per_iteration",
    "cold",
    "late",
)


def describe(file: str, result: Result, pictures: list[Path]) -> Section:
    """The section of one result file. Schemas without a reader of their own get tables of all they hold."""
    schema = str(result["schema"])
    headlines, tables = _READERS.get(schema, _read_any)(result)
    notes = [str(note) for note in _as_list(result.get("notes"))]
    if schema not in _READERS:
        notes.append(f"{schema} has no section of its own here: all its tables and values are shown")
    facts = {key: result.get(key) for key in ("git", "host", "versions", "config")}
    return Section(
        file=file,
        schema=schema,
        source=str(result.get("source", "")),
        command=str(result.get("command", "")),
        headlines=tuple(headlines),
        notes=tuple(notes),
        tables=tuple(tables),
        pictures=tuple(pictures),
        details=(key_table("how it was run", facts),),
    )


def key_table(title: str, values: dict[str, Any]) -> Table:
    """Every scalar in a nest of dictionaries, one a row, under its dotted path."""
    rows = tuple((key, format_value(_short(value))) for key, value in flatten(values).items() if not _is_table(value))
    return Table(title=title, columns=("key", "value"), rows=rows)


def row_table(title: str, rows: list[Result], columns: tuple[str, ...] | None = None) -> Table:
    """A list of dictionaries as a table; nested dictionaries become dotted columns, long lists are left out."""
    flat = [flatten(row) for row in rows]
    found = [key for row in flat for key, value in row.items() if not isinstance(value, list | dict)]
    names = columns or tuple(dict.fromkeys(found))
    return Table(title=title, columns=names, rows=tuple(tuple(row.get(name) for name in names) for row in flat))


def flatten(values: Result, prefix: str = "") -> Result:
    """Nested dictionaries as one, with dotted keys."""
    flat: Result = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_simulate(result: Result) -> tuple[list[str], list[Table]]:
    routes, machine, verdict = result["routes"], result["machine"], result["verdict"]
    headlines = [verdict["reason"]]
    if "prediction_reason" in verdict:
        headlines.append(verdict["prediction_reason"])
    tables = [
        key_table("what was simulated", {"routes": routes, "machine": machine}),
        row_table("balancers", result["balancers"], _SIMULATE_COLUMNS),
    ]
    for sweep in dict.fromkeys(point["sweep"] for point in result["sweeps"]):
        points = [point for point in result["sweeps"] if point["sweep"] == sweep]
        rows = [{"value": p["value"]} | {r["name"]: r["layer_ms"] for r in p["balancers"]} for p in points]
        tables.append(row_table(f"mean layer ms by {sweep}", rows))
    if "switch" in result:
        switch = result["switch"]
        settled = [{"name": name, "iterations": n} for name, n in switch["settled_after"].items()]
        title = f"iterations from the switch at {switch['iteration']} to within 2 % of the final level"
        tables.append(row_table(title, settled))
    return headlines, tables


def _read_profile(result: Result) -> tuple[list[str], list[Table]]:
    metric, below = result["metric"].replace("-", "_"), result["below_threshold"]
    headline = (
        f"{len(below)} (layer, distance) pairs are below {result['metric']} {format_value(result['threshold'])}: "
        "these are what moeless finetune would tune"
    )
    names = ("predictor", "distance", "phase")
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in result["rows"]:
        groups.setdefault(tuple(row[name] for name in names), []).append(row[metric])
    means = [
        dict(zip(names, key, strict=True)) | {"layers": len(v), f"mean {metric}": sum(v) / len(v)}
        for key, v in groups.items()
    ]
    return [headline], [
        key_table("model and text", _some(result, "model", "data", "num_tokens")),
        row_table("predictors, mean over layers", means),
        row_table("expert loads by layer", result["load"], ("layer", "phase", "cv", "max_over_mean", "num_iterations")),
        row_table("below the threshold", below),
    ]


def _read_finetune(result: Result) -> tuple[list[str], list[Table]]:
    layers = result["layers"]
    verdicts = [row["verdict"] for row in layers]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    columns = ("target_layer", "distance", "source", "before", "after", "verdict", "loss", "adapter_rank", "seconds")
    rest = {key: value for key, value in result.items() if key not in (*_HEADER, "notes", "layers")}
    headline = f"{len(layers)} predictors: {counts} (h = {format_value(result['threshold'])} of {result['metric']})"
    return [headline], [row_table("predictors", layers, columns), key_table("values", rest)]


def _read_predictors(result: Result) -> tuple[list[str], list[Table]]:
    best: dict[Any, Result] = {}
    for row in result["rows"]:
        real = row["predictor"] not in ("actual", "history")
        if real and row["token_recall"] > best.get(row["distance"], {"token_recall": -1.0})["token_recall"]:
            best[row["distance"]] = row
    found = ", ".join(f"d={d}: {row['predictor']} {row['token_recall']:.3f}" for d, row in sorted(best.items()))
    sizes = _some(result, "model", "data", "num_tokens", "num_threads")
    tables = [row_table("predictors, mean over layers", result["rows"]), key_table("model and text", sizes)]
    return [f"highest token recall by distance: {found}"], tables


def _read_layers(result: Result) -> tuple[list[str], list[Table]]:
    rows = result.get("balancers", [])
    facts = _some(result, "routes", "clock", "calibration")
    headlines = [f"clock: {result['clock']}"]
    lossless = [row for row in rows if not row["lossy"] and row["name"] != "bound"]
    if lossless:
        best = min(lossless, key=lambda row: float(row["layer_ms"]["mean"]))
        headlines[0] = f"{best['name']} has the fastest layer: {best['over_static']:.3f} x static; {headlines[0]}"
    return headlines, [row_table("balancers", rows), key_table("set-up and calibration", facts)]


def _read_serve(result: Result) -> tuple[list[str], list[Table]]:
    """Columns are runs here: there are few of them and many numbers."""
    rows = result["runs"]
    best = max(rows, key=lambda row: float(row["output_throughput"]))
    failed = sum(row["failed"] for row in rows)
    headline = f"{best['name']}: {best['output_throughput']:.1f} output tokens a second"
    if len(rows) > 1 and rows[0]["output_throughput"]:
        headline += f", {best['output_throughput'] / rows[0]['output_throughput']:.3f} x {rows[0]['name']}"
    flat = [flatten(row) for row in rows]
    keys = [key for key in dict.fromkeys(key for row in flat for key in row) if key != "name"]
    lines = [{"": key} | {row["name"]: row.get(key) for row in flat} for key in keys]
    return [f"{headline}; {failed} failed requests"], [
        key_table("load", result["load"]),
        row_table("runs", lines),
    ]


def _read_any(result: Result) -> tuple[list[str], list[Table]]:
    """Scalars in one table, and one table for every list of dictionaries."""
    rest = {key: value for key, value in result.items() if key not in (*_HEADER, "notes")}
    verdict = rest.get("verdict")
    headlines = [str(verdict["reason"])] if isinstance(verdict, dict) and "reason" in verdict else []
    flat = flatten(rest)
    tables = [key_table("values", rest)] if any(not _is_table(value) for value in flat.values()) else []
    return headlines, tables + [row_table(key, value) for key, value in flat.items() if _is_table(value)]


def _some(result: Result, *keys: str) -> Result:
    return {key: result[key] for key in keys if key in result}


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _short(value: Any) -> Any:
    if not isinstance(value, list | str):
        return value
    text = ", ".join(map(format_value, value)) if isinstance(value, list) else value
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_READERS: dict[str, Callable[[Result], tuple[list[str], list[Table]]]] = {
    "moeless.simulate/1": _read_simulate,
    "moeless.profile/1": _read_profile,
    "moeless.finetune/1": _read_finetune,
    "moeless.bench.predictors/1": _read_predictors,
    "moeless.layers/1": _read_layers,
    "moeless.bench-serve/1": _read_serve,
}
