"""The header of every result file: what was run, where, with which versions, and whether numbers are simulated."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import moeless

Source = Literal["live", "simulated"]


def result_header(schema: str, source: Source, config: Any) -> dict[str, Any]:
    """The keys that all result files share.

    Args:
        schema: name and version, such as `moeless.profile/1`.
        source: `live` for measured numbers, `simulated` for modelled ones; no result file is without it.
        config: the command's configuration, a dataclass of plain values.
    """
    return {
        "schema": schema,
        "source": source,
        "command": shlex.join(["moeless", *sys.argv[1:]]),
        "git": _git_commit(),
        "host": {"platform": platform.platform(), "machine": platform.machine(), "num_cpus": os.cpu_count()},
        "versions": {"moeless": moeless.__version__, "python": platform.python_version(), **_package_versions()},
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()},
    }


def _package_versions() -> dict[str, str]:
    """Installed versions without importing the packages."""
    found = {}
    for name in ("torch", "transformers", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """The commit of the checkout this package runs from, None for an installed package."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
