"""Readers of what other engines record: SGLang's expert distribution recorder and TensorRT-LLM's expert statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError
from moeless.trace.files import read_safetensors
from moeless.trace.loads import LoadTrace, make_loads


def read_sglang(path: Path) -> LoadTrace:
    """`expert_distribution_recorder_{time}.pt`, one file or a folder of them in the order of their names.

    Of the modes `stat` and `stat_approx`: `logical_count` [steps, layers, experts]. Steps that are zero throughout are
    room the recorder's ring had not used yet, and are left out. Imports torch, which this format alone needs.

    Raises:
        DataError: damaged, of a per-pass or per-token mode, or files that do not fit together.
    """
    files = sorted(path.glob("expert_distribution_recorder_*.pt")) if path.is_dir() else [path]
    steps = [_read_sglang_file(file) for file in files]
    shapes = {s.shape[1:] for s in steps}
    if len(shapes) > 1:
        raise DataError(f"{path}: the recorder's files have different layers and experts: {sorted(shapes)}")
    counts = np.concatenate(steps)
    used = counts.any((1, 2))
    if not used.any():
        raise DataError(f"{path}: every recorded step is empty")
    return make_loads(counts[used], name=path.name)


def _read_sglang_file(path: Path) -> NDArray[Any]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no common error class
        raise DataError(f"{path}: cannot be read as a file of tensors ({str(error).splitlines()[0]})") from error
    if isinstance(content, dict) and "records" in content:
        raise DataError(
            f"{path}: holds single passes of one rank; record with --expert-distribution-recorder-mode stat instead"
        )
    counts = content.get("logical_count") if isinstance(content, dict) else None
    if not isinstance(counts, torch.Tensor) or counts.ndim != 3:
        raise DataError(f"{path}: no logical_count [steps, layers, experts] in it")
    array: NDArray[Any] = counts.numpy()
    return array


def read_tensorrt(path: Path) -> LoadTrace:
    """A folder that TensorRT-LLM wrote to EXPERT_STATISTIC_PATH: `meta_info.json` and `rank*.safetensors`.

    Each rank's file maps `{iteration}_{layer}` to its own tokens' counts [experts]; ranks are summed. Layers keep
    their order but are numbered from 0, since dense layers have no counts.

    Raises:
        DataError: a missing or damaged file, a bad key, or a layer that some iteration lacks.
    """
    meta = _read_meta(path / "meta_info.json")
    totals: dict[tuple[int, int], NDArray[Any]] = {}
    files = sorted(f for f in path.glob("rank*.safetensors") if f.stem[4:].isdecimal())
    if not files:
        raise DataError(f"{path}: has meta_info.json but no rank*.safetensors beside it")
    for file in files:
        for key, counts in read_safetensors(file)[0].items():
            iteration, _, layer = key.partition("_")
            if not iteration.isdecimal() or not layer.isdecimal() or counts.shape != (meta["num_experts"],):
                raise DataError(
                    f"{file}: {key!r} {counts.shape} is not {meta['num_experts']} counts of iteration_layer"
                )
            where = (int(iteration), int(layer))
            totals[where] = totals[where] + counts if where in totals else counts
    iterations, layers = (sorted({key[axis] for key in totals}) for axis in (0, 1))
    missing = [(i, layer) for i in iterations for layer in layers if (i, layer) not in totals]
    if missing:
        raise DataError(f"{path}: iteration {missing[0][0]} has no counts of layer {missing[0][1]}")
    stacked = np.array([[totals[i, layer] for layer in layers] for i in iterations])
    return make_loads(stacked, name=path.name, top_k=meta["num_experts_per_token"])


def _read_meta(path: Path) -> dict[str, int]:
    try:
        meta = json.loads(path.read_text())
        return {key: int(meta[key]) for key in ("num_experts", "num_experts_per_token")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: must give num_experts and num_experts_per_token ({error!r})") from error
