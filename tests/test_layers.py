"""The package's import directions, file and function sizes, held by a walk over its syntax trees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moeless"
FILES = sorted(PACKAGE.rglob("*.py"))

# A layer may import itself and what stands in its row; everything may import errors.
FOUNDATION = {"errors", "files", "config", "metrics", "result", "progress", "tables", "moeless"}
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "config": {"errors"},
    "metrics": {"errors"},
    "result": {"moeless"},
    "progress": set(),
    "tables": set(),
    "trace": {"errors", "files", "metrics"},
    "policy": {"errors", "metrics"},
    "models": FOUNDATION | {"policy", "trace"},
    "train": FOUNDATION | {"models", "policy", "trace"},
    "engine": FOUNDATION | {"models", "policy", "trace"},
    "bench": FOUNDATION | {"models", "policy", "trace", "train", "engine"},
    "cli": FOUNDATION | {"models", "policy", "trace", "train", "engine", "bench"},
    "__main__": {"cli"},
    "moeless": {"errors", "engine"},
}


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "moeless" if parts == ("__init__",) else parts[0]


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    layer = layer_of(path)
    for module in imported_modules(path):
        if module == "moeless" or module.startswith("moeless."):
            parts = module.split(".")
            target = parts[1] if len(parts) > 1 and not parts[1].startswith("__") else "moeless"
            assert target == layer or target in ALLOWED[layer], f"{layer} may not import {module}"


def test_only_ep_imports_torch_distributed() -> None:
    for path in FILES:
        if path != PACKAGE / "engine" / "ep.py":
            assert not any(m.startswith("torch.distributed") for m in imported_modules(path)), path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 300
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 50, node.name


LIGHT = ["moeless.cli", "moeless.policy", "moeless.metrics"]
LIGHT += ["moeless.trace.formats", "moeless.bench.simulate"]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_load_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


FORBIDDEN = r"\b(?:c?pickle|cloudpickle|dill|marshal|shelve|joblib|jsonpickle)\b|_object(?:_list)?\("
FORBIDDEN += r"|(?:send|recv)_pyobj|weights_only=False|allow_pickle=True|yaml\.(?:unsafe_|full_)?load\("


def test_no_pickle_and_no_object_collectives() -> None:
    for path in [*FILES, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "checkpoints").glob("*.py")]:
        found = re.findall(FORBIDDEN, path.read_text())
        assert not found, f"{path}: {found}"


def test_what_could_unpickle_is_told_not_to() -> None:
    """`torch.load` and `numpy.load` read pickles unless their call says no; every call says it."""
    says = {"torch": "weights_only=True", "np": "allow_pickle=False"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if call.startswith(("torch.load(", "np.load(")):
                assert says[call.partition(".")[0]] in call, f"{path}: {call}"
