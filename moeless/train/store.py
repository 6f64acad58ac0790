"""`CaptureStore`: captured rows in memory up to a budget, beyond it in safetensors shards of a folder.

A folder has `capture.json` (what was captured, which shards, how far) and `shard-*.safetensors`. The manifest is
rewritten after each shard, so an interrupted capture goes on from its last whole shard.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from moeless.errors import CapacityError, DataError
from moeless.files import replacing, require_free_bytes, write_json
from moeless.models.shards import read_header, read_json_file
from moeless.train.rows import CapturedRows, concatenate

FORMAT = "moeless.capture/1"
MANIFEST = "capture.json"


class CaptureStore:
    """Append rows work item by work item, then read them back batch by batch or layer by layer.

    Args:
        folder: where shards go; None keeps rows in memory and spills to a temporary folder only beyond the budget.
        fingerprint: JSON values that say what is captured; an existing folder must have the same.
        budget_bytes: rows held in memory before they are written out.

    Raises:
        DataError: the folder holds another capture, or a damaged one.
    """

    def __init__(self, folder: Path | None, fingerprint: dict[str, Any], budget_bytes: int) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.folder = folder
        self.fingerprint = fingerprint
        self.budget_bytes = budget_bytes
        self.complete = False
        self._shards: list[dict[str, Any]] = []
        self._buffer: list[CapturedRows] = []
        self._buffered_bytes = 0
        if folder is not None and (folder / MANIFEST).exists():
            self._resume(folder / MANIFEST)

    @property
    def num_items(self) -> int:
        """Work items appended so far, those of an earlier, interrupted run included."""
        return sum(shard["num_items"] for shard in self._shards) + len(self._buffer)

    def append(self, rows: CapturedRows) -> None:
        """Add the rows of the next work item. Raises `CapacityError` when a spill finds the disk full."""
        self._buffer.append(rows)
        self._buffered_bytes += rows.num_bytes
        if self._buffered_bytes > self.budget_bytes:
            self._flush()

    def finish(self) -> None:
        """Mark the capture complete; with a folder, everything is on disk afterwards."""
        self.complete = True
        if self.folder is not None:
            self._flush()

    def batches(self) -> Iterator[CapturedRows]:
        """All rows in order, one shard or buffered item at a time."""
        for shard in self._shards:
            yield CapturedRows.from_tensors(load_file(self._shard_path(shard)))
        yield from self._buffer

    def column(self, name: str, layer: int | None = None) -> torch.Tensor:
        """One column over all rows, alone: `phases`, `documents` ..., or channel `name` of one `layer`."""
        return torch.cat(list(self.parts(name, layer)))

    def parts(self, name: str, layer: int | None = None) -> Iterator[torch.Tensor]:
        """The same, one shard or buffered item at a time, for columns larger than memory."""
        key = name if layer is None else f"{name}.{layer}"
        for shard in self._shards:
            with safe_open(self._shard_path(shard), "pt") as file:
                yield file.get_tensor(key)
        for rows in self._buffer:
            yield getattr(rows, name) if layer is None else rows.channels[name][layer]

    @property
    def channels(self) -> set[str]:
        """Names of the channels that were recorded."""
        if self._buffer:
            return set(self._buffer[0].channels)
        names = read_header(self._shard_path(self._shards[0])) if self._shards else {}
        return {name.partition(".")[0] for name in names if "." in name}

    def close(self) -> None:
        """Remove the temporary folder, if one was needed."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _flush(self) -> None:
        if self.folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="moeless-capture-")
            self.folder = Path(self._temporary.name)
        if self._buffer:
            path = self.folder / f"shard-{len(self._shards):05d}.safetensors"
            require_free_bytes(self.folder, self._buffered_bytes, "writing a capture shard")
            try:
                with replacing(path) as partial:
                    save_file(concatenate(self._buffer).tensors(), partial)
            except SafetensorError as error:
                raise CapacityError(f"cannot write {str(path)!r}: {error}; free some disk or choose another") from error
            self._shards.append({"file": path.name, "num_items": len(self._buffer)})
            self._buffer, self._buffered_bytes = [], 0
        manifest = {"format": FORMAT, "complete": self.complete, "fingerprint": self.fingerprint}
        write_json(self.folder / MANIFEST, {**manifest, "shards": self._shards})

    def _resume(self, path: Path) -> None:
        manifest = read_json_file(path)
        if manifest.get("format") != FORMAT:
            raise DataError(f"{str(path)!r} is not a capture of this version ({FORMAT}); choose another folder")
        found = manifest["fingerprint"]
        for key, value in self.fingerprint.items():
            if found.get(key) != value:
                raise DataError(
                    f"{str(path.parent)!r} holds another capture: its {key} is {found.get(key)!r}, not {value!r}; "
                    "choose another folder or the same settings"
                )
        self._shards, self.complete = manifest["shards"], manifest["complete"]
        for shard in self._shards:
            read_header(self._shard_path(shard))

    def _shard_path(self, shard: dict[str, Any]) -> Path:
        assert self.folder is not None
        return self.folder / shard["file"]
