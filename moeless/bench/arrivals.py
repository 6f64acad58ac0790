"""When requests arrive and how long they are: the Azure and Mooncake traces, or a Poisson process.

Legend: N requests.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError

BLOCK_TOKENS = 512
"""Prompt tokens that a hash id of Mooncake's stands for."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


_Row = tuple[float, int, int, tuple[int, ...]]
"""Seconds, prompt tokens, output tokens, blocks."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """N requests in order of arrival; `times_s_N` starts at 0."""

    times_s_N: NDArray[np.float64]
    prompt_tokens_N: NDArray[np.int64]
    output_tokens_N: NDArray[np.int64]
    name: str
    blocks: tuple[tuple[int, ...], ...] = ()
    """Where a trace tells it, each request's prompt in blocks of `BLOCK_TOKENS`: the same number is the same text."""

    def __len__(self) -> int:
        return len(self.times_s_N)


def read_arrivals(path: Path) -> Arrivals:
    """Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSONL (timestamp in ms, input_length, ...).

    Mooncake's `hash_ids` become `Arrivals.blocks`.

    Raises:
        DataError: another kind of file, or a row that cannot be read, named by line and reason.
    """
    readers = {".csv": _azure_rows, ".jsonl": _mooncake_rows}
    if not path.is_file():
        raise DataError(f"no arrivals at {str(path)!r}")
    if path.suffix not in readers:
        raise DataError(f"{str(path)!r} is no arrivals file; give Azure's .csv or Mooncake's .jsonl")
    try:
        rows = list(readers[path.suffix](path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not rows:
        raise DataError(f"{path}: no requests in it")
    times, prompts, outputs = (np.array(column) for column in list(zip(*rows, strict=True))[:3])
    order = np.argsort(times, kind="stable")
    blocks = tuple(rows[i][3] for i in order)
    return Arrivals(
        times_s_N=times[order] - times.min(),
        prompt_tokens_N=prompts[order],
        output_tokens_N=outputs[order],
        name=path.name,
        blocks=blocks if any(blocks) else (),
    )


def poisson_arrivals(rate_per_s: float, lengths: NDArray[np.int64], num_requests: int, seed: int) -> Arrivals:
    """Independent arrivals at a mean rate, with prompt and output lengths each drawn from `lengths`."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate_per_s, num_requests)
    return Arrivals(
        times_s_N=np.cumsum(gaps) - gaps[0],
        prompt_tokens_N=rng.choice(lengths, num_requests),
        output_tokens_N=rng.choice(lengths, num_requests),
        name=f"poisson {rate_per_s:g}/s",
    )


def _azure_rows(path: Path) -> Iterator[_Row]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        lacking = [column for column in _AZURE_COLUMNS if column not in (reader.fieldnames or ())]
        if lacking:
            raise DataError(f"{path}: line 1: no column {', '.join(lacking)}")
        first: np.datetime64 | None = None
        for row in reader:
            where = f"{path}: line {reader.line_num}"
            try:
                # seven fractional digits, one more than datetime.fromisoformat takes
                time = np.datetime64(row["TIMESTAMP"].strip(), "ns")
            except (ValueError, AttributeError):
                raise DataError(f"{where}: TIMESTAMP {row['TIMESTAMP']!r} is no date and time") from None
            first = time if first is None else first
            seconds = float((time - first) / np.timedelta64(1, "s"))
            prompt, output = (_tokens(where, column, row[column]) for column in _AZURE_COLUMNS[1:])
            yield seconds, prompt, output, ()


def _mooncake_rows(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                seconds = float(row["timestamp"]) / 1e3
                prompt, output = row["input_length"], row["output_length"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{where}: needs timestamp, input_length and output_length ({error!r})") from None
            blocks = row.get("hash_ids") or []
            if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
                raise DataError(f"{where}: hash_ids must be a list of whole numbers")
            lengths = _tokens(where, "input_length", prompt), _tokens(where, "output_length", output)
            yield seconds, *lengths, tuple(blocks)


def _tokens(where: str, name: str, value: object) -> int:
    text = str(value).strip()
    if not text.isdecimal():
        raise DataError(f"{where}: {name} must be a whole number, got {value!r}")
    return int(text)
