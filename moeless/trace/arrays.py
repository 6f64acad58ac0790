"""Readers of numpy files: `.npz` with per-token ids or counts, and vLLM's `routed_experts` as `.npy`.

No array of objects is ever loaded, so reading a file cannot run code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError
from moeless.trace.loads import LoadTrace, make_loads
from moeless.trace.routes import Phase, Routes, drop_sequences, make_routes


def read_npz(path: Path, num_experts: int | None) -> Routes | LoadTrace:
    """Per-token ids (`experts` [T, L, K] with `offsets`, or `data` [T, K] of one layer), or `counts` [I, L, E].

    String arrays with one value a sequence become labels. Sequences marked by a boolean array `repetition` are left
    out: a model stuck in a loop routes alike for thousands of tokens.
    """
    arrays = _load(path)
    if "experts" in arrays:
        return _read_sequences(path, arrays, num_experts)
    if "data" in arrays and arrays["data"].ndim == 2:
        note = "one layer, one batch of tokens"
        return make_routes(
            arrays["data"][:, None], name=path.name, phase="mixed", num_experts=num_experts, notes=(note,)
        )
    if "counts" in arrays:
        return make_loads(arrays["counts"], name=path.name)
    raise DataError(
        f"{path}: none of experts [tokens, layers, k], data [tokens, k] or counts [iterations, layers, experts] "
        f"among its arrays ({', '.join(sorted(arrays)) or 'none'})"
    )


def read_npy(path: Path, num_experts: int | None) -> Routes:
    """vLLM's `routed_experts` of one request or several laid end to end: integers [tokens, layers, k]."""
    try:
        with path.open("rb") as file:  # opened here, as numpy leaves it open when it fails
            ids = np.load(file, allow_pickle=False)
    except Exception as error:  # numpy parses a header as Python, and fails in many ways
        raise DataError(f"{path}: cannot be read as a numpy array ({error})") from error
    if not isinstance(ids, np.ndarray):
        raise DataError(f"{path}: not a single array; an archive of arrays is named .npz")
    return make_routes(ids, name=path.name, phase="mixed", num_experts=num_experts)


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except Exception as error:  # zipfile, zlib and numpy each have errors of their own
        raise DataError(f"{path}: cannot be read as an .npz archive of plain arrays ({error})") from error
    if other := [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise DataError(f"{path}: {other[0]!r} in it is not an array")
    return arrays


def _read_sequences(path: Path, arrays: dict[str, NDArray[Any]], num_experts: int | None) -> Routes:
    ids, offsets = arrays["experts"], arrays.get("offsets")
    num_sequences = 1 if offsets is None else len(offsets) - 1
    labels = {
        key: tuple(array.tolist())
        for key, array in arrays.items()
        if array.dtype.kind == "U" and array.shape == (num_sequences,)
    }
    phase: Phase = "mixed"
    if "prompt_tokens" in arrays:
        phase = "decode"
    elif "prompt_num" in arrays:
        phase = "prefill"
    routes = make_routes(ids, name=path.name, phase=phase, offsets=offsets, num_experts=num_experts, labels=labels)
    repetition = arrays.get("repetition")
    if repetition is not None and repetition.shape == (num_sequences,):
        routes = drop_sequences(routes, repetition.astype(bool), "they repeat themselves")
    return routes
