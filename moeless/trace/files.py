"""The native trace file: one safetensors file of plain arrays, its version and metadata in the header.

Nothing in it can run code when read, and arrays are mapped rather than parsed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError
from moeless.files import replacing
from moeless.trace.loads import LoadTrace

FORMAT, VERSION = "moeless.trace", 1

# Array in the file -> field of LoadTrace and the type it is stored in.
_ARRAYS: dict[str, tuple[str, str | None]] = {
    "counts": ("counts_ILE", "int32"),
    "predicted": ("predicted_ILE", "int32"),
    "rank_counts": ("rank_counts_ILGE", "int32"),
    "ready": ("ready_ILEG", "uint8"),
    "phases": ("phases_I", "uint8"),
    "num_tokens": ("num_tokens_I", "int32"),
    "durations_s": ("durations_s_I", "float64"),
    "ids": ("ids_TLK", None),
    "token_offsets": ("token_offsets", "int64"),
    "sequences": ("sequences_T", "int64"),
}
_REQUIRED = ("counts", "phases", "num_tokens")


def save_trace(path: Path, trace: LoadTrace) -> None:
    """Write a trace atomically. Errors as in `moeless.files.replacing`."""
    from safetensors.numpy import save_file

    arrays = {key: getattr(trace, name) for key, (name, _) in _ARRAYS.items()}
    present = {key: np.ascontiguousarray(array) for key, array in arrays.items() if array is not None}
    header = {"name": trace.name, "metadata": dict(trace.metadata), "notes": list(trace.notes)}
    metadata = {"format": FORMAT, "version": str(VERSION), "header": json.dumps(header, allow_nan=False)}
    with replacing(path) as partial:
        save_file(present, partial, metadata=metadata)


def load_trace(path: Path) -> LoadTrace:
    """Read a native trace file.

    Raises:
        DataError: not such a file, a version this program does not know, or damaged.
    """
    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise DataError(
            f"{path}: a safetensors file but not a routing trace (its format is {metadata.get('format')!r})"
        )
    if metadata.get("version") != str(VERSION):
        raise DataError(
            f"{path}: trace version {metadata.get('version')!r}, this program reads version {VERSION}; "
            "record it again or use the version of moeless that wrote it"
        )
    missing = [key for key in _REQUIRED if key not in arrays]
    if missing:
        raise DataError(f"{path}: the trace lacks {', '.join(missing)}")
    for key, (_, dtype) in _ARRAYS.items():
        if key in arrays and dtype is not None and arrays[key].dtype != dtype:
            raise DataError(f"{path}: {key} is {arrays[key].dtype}, must be {dtype}")
    try:
        header = json.loads(metadata.get("header", ""))
        name, extra, notes = header["name"], header["metadata"], tuple(header["notes"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the trace's header cannot be read ({error})") from error
    fields: dict[str, Any] = {_ARRAYS[key][0]: array for key, array in arrays.items() if key in _ARRAYS}
    try:
        return LoadTrace(**fields, name=name, metadata=extra, notes=notes)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """All arrays and the string metadata of a safetensors file, without torch.

    Raises:
        DataError: missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{path}: cannot be read as safetensors ({error})") from error
