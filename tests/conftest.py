"""What all tests share: one thread (the machine's cores are the test runner's), no bars, the bundled model's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

DEMO_MODEL = Path(__file__).parent.parent / "checkpoints" / "demo-moe"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled checkpoint."""
    return DEMO_MODEL
