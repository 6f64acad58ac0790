"""One door to every trace format: the file's kind is told by its name, and by what is in it where names are shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moeless.errors import DataError, UsageError
from moeless.trace.arrays import read_npy, read_npz
from moeless.trace.engines import read_sglang, read_tensorrt
from moeless.trace.files import load_trace
from moeless.trace.loads import LoadTrace
from moeless.trace.routes import Routes
from moeless.trace.tables import read_csv, read_jsonl, read_popularity

Trace = Routes | LoadTrace

# Formats whose files need not show how many experts there are: their readers take the number.
_WITH_EXPERTS: dict[str, Callable[[Path, int | None], Trace]] = {
    ".npz": read_npz,
    ".npy": read_npy,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
}
_WITHOUT: dict[str, Callable[[Path], Trace]] = {
    ".safetensors": load_trace,
    ".pt": read_sglang,
    ".json": read_popularity,
}


def read_trace(path: Path, num_experts: int | None = None) -> Trace:
    """Read a routing trace of any known format.

    Args:
        path: a native trace (`.safetensors`), per-token ids (`.npz`, `.npy`, `.jsonl`), counts (`.csv`, `.npz`,
            `.json`), SGLang's recorder (`.pt` or a folder of them), or TensorRT-LLM's statistics folder.
        num_experts: experts a layer, for formats that do not say.

    Raises:
        DataError: naming the file, the row and the reason.
        UsageError: `num_experts` for a format that has the number in it.
    """
    if not path.exists():
        raise DataError(f"no routing trace at {str(path)!r}")
    if not path.is_dir() and path.suffix in _WITH_EXPERTS:
        return _WITH_EXPERTS[path.suffix](path, num_experts)
    if num_experts is not None:
        raise UsageError(f"--num-experts has no effect on {str(path)!r}: this format says how many there are")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix in _WITHOUT:
        return _WITHOUT[path.suffix](path)
    known = ", ".join([*_WITH_EXPERTS, *_WITHOUT])
    raise DataError(f"{str(path)!r} is of no known trace format ({known}, or a folder of an engine's statistics)")


def _read_folder(path: Path) -> Trace:
    if (path / "meta_info.json").exists():
        return read_tensorrt(path)
    if any(path.glob("expert_distribution_recorder_*.pt")):
        return read_sglang(path)
    raise DataError(
        f"{str(path)!r} holds neither TensorRT-LLM's meta_info.json nor SGLang's expert_distribution_recorder_*.pt"
    )
