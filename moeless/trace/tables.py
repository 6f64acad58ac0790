"""Readers of text: `layer,expert,count` tables, one JSON object a routed token, and popularity by subject."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moeless.errors import DataError
from moeless.trace.loads import LoadTrace, make_loads
from moeless.trace.routes import MAX_EXPERTS, Routes, make_routes

_MAX_LAYERS, _MAX_ITERATIONS = 1_024, 1_000_000


def read_csv(path: Path, num_experts: int | None) -> LoadTrace:
    """A table with the columns layer, expert, count and optionally iteration; absent rows are zero, repeated ones add.

    Raises:
        DataError: naming the line and what is wrong with it.
    """
    cells: dict[tuple[int, int, int], int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lacking = {"layer", "expert", "count"} - set(reader.fieldnames or ())
            if lacking:
                raise DataError(f"{path}: line 1: no column {', '.join(sorted(lacking))}; need layer,expert,count")
            for row in reader:
                where = f"{path}: line {reader.line_num}"
                iteration = _whole(where, "iteration", row.get("iteration") or "0", _MAX_ITERATIONS)
                layer = _whole(where, "layer", row["layer"], _MAX_LAYERS)
                expert = _whole(where, "expert", row["expert"], num_experts or MAX_EXPERTS)
                key = (iteration, layer, expert)
                cells[key] = cells.get(key, 0) + _whole(where, "count", row["count"], 2**31)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error
    if not cells:
        raise DataError(f"{path}: the table has no rows")
    sizes = [max(key[axis] for key in cells) + 1 for axis in range(3)]
    counts = np.zeros((sizes[0], sizes[1], num_experts or sizes[2]), np.int64)
    for key, value in cells.items():
        counts[key] = value
    return make_loads(counts, name=path.name)


def read_jsonl(path: Path, num_experts: int | None) -> Routes:
    """One object a line with layer, experts, token_idx and optionally problem_id (a sequence) and gating_probs.

    Tokens of which some layer is missing are left out, with a note. `gating_probs` of all experts gives their number.

    Raises:
        DataError: naming the line and what is wrong with it.
    """
    tokens: dict[tuple[str, int], dict[int, list[int]]] = {}
    top_k = 0
    for number, row in _json_lines(path):
        where = f"{path}: line {number}"
        experts, layer, token = row.get("experts"), row.get("layer"), row.get("token_idx")
        if not isinstance(experts, list) or not experts or not all(type(e) is int for e in experts):
            raise DataError(f"{where}: experts must be a list of integers, got {experts!r}")
        if type(layer) is not int or type(token) is not int or not 0 <= layer < _MAX_LAYERS:
            raise DataError(f"{where}: layer and token_idx must be integers, got {layer!r} and {token!r}")
        if top_k and len(experts) != top_k:
            raise DataError(f"{where}: {len(experts)} experts where earlier lines have {top_k}")
        top_k = len(experts)
        routed = tokens.setdefault((str(row.get("problem_id", 0)), token), {})
        if layer in routed:
            raise DataError(f"{where}: token {token} has layer {layer} twice")
        routed[layer] = experts
    if not tokens:
        raise DataError(f"{path}: no routed tokens in it")
    num_layers = 1 + max(layer for routed in tokens.values() for layer in routed)
    order = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in tokens))}
    whole = sorted((k for k, routed in tokens.items() if len(routed) == num_layers), key=lambda k: (order[k[0]], k[1]))
    if not whole:
        raise DataError(f"{path}: no token has all {num_layers} layers")
    names = [name for name, _ in whole]
    bounds = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    lost = len(tokens) - len(whole)
    return make_routes(
        np.array([[tokens[key][layer] for layer in range(num_layers)] for key in whole]),
        name=path.name,
        phase="mixed",
        offsets=np.array([*bounds, len(whole)]),
        num_experts=num_experts,
        labels={"problem_id": tuple(names[i] for i in bounds)},
        notes=(f"{lost} of {len(tokens)} tokens left out: some layer of theirs is missing",) if lost else (),
    )


def read_popularity(path: Path) -> LoadTrace:
    """A JSON object subject -> {expert_popularity: counts [layers][experts]}; each subject is one iteration.

    Raises:
        DataError: not such a file, or subjects of different sizes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = {subject: value["expert_popularity"] for subject, value in content.items()}
        counts = np.array(list(tables.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not subject -> expert_popularity [layers][experts] ({error!r})") from error
    return make_loads(counts, name=path.name, notes=(f"iterations are subjects: {', '.join(tables)}",))


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{path}: line {number}: an object is expected, got {type(row).__name__}")
                yield number, row
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {number}: not JSON ({error.msg})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _whole(where: str, name: str, text: str | None, limit: int) -> int:
    if text is None or not text.strip().isdecimal() or int(text) >= limit:
        raise DataError(f"{where}: {name} must be a whole number below {limit}, got {text!r}")
    return int(text)
