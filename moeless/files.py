"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moeless.errors import CapacityError, DataError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path in `path`'s folder; rename it over `path` on success, remove it on failure.

    Raises:
        CapacityError: the disk is full.
        DataError: the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno == 28:
            raise CapacityError(
                f"no space left on the disk of {str(path)!r}; free some or choose another folder"
            ) from error
        raise DataError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # where the folder could not be made, there is nothing to remove
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically. Errors as in `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinity are refused. Errors as in `replacing`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def require_writable(folder: Path) -> None:
    """Raise `DataError` before a long job, rather than after it, when `folder` cannot be made or written."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "not writable" if existing.is_dir() else "not a folder"
        raise DataError(f"cannot write to {str(folder)!r}: {str(existing)!r} is {reason}; choose another folder")


def require_free_bytes(folder: Path, num_bytes: int, purpose: str) -> None:
    """Raise `CapacityError` before a long job, rather than in it, when `folder`'s disk cannot hold `num_bytes`."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise CapacityError(
            f"{purpose} needs {num_bytes / 1e9:.2f} GB but the disk of {str(folder)!r} has {free / 1e9:.2f} GB free; "
            "use fewer tokens or another folder"
        )
