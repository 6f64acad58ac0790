"""Small routes made by a seeded generator, and where the real ones lie; shared by the tests of traces and simulation.

Legend: T tokens, L layers, K experts a token.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeless.trace.routes import Phase, Routes, make_routes

DATA = Path(os.environ.get("MOELESS_DATA", Path(__file__).parents[2] / "shared" / "data"))


def real(relative: str) -> Path:
    """A file of the real traces; skips the test where it is absent."""
    path = DATA / relative
    if not path.exists():
        pytest.skip(f"{relative} is not there; set MOELESS_DATA")
    return path


def skewed_ids(
    num_tokens: int, *, num_layers: int = 3, num_experts: int = 16, top_k: int = 2, seed: int = 0, shift: int = 0
) -> NDArray[Any]:
    """Ids [T, L, K] whose popularity falls as 1 / rank; `shift` rotates which experts are the popular ones."""
    rng = np.random.default_rng(seed)
    popularity = np.roll(np.log(1 / (1 + np.arange(num_experts))), shift)
    keys = popularity + rng.gumbel(size=(num_tokens, num_layers, num_experts))
    return np.argsort(-keys, axis=-1)[:, :, :top_k]


def skewed_routes(num_sequences: int = 40, length: int = 30, phase: Phase = "decode", **kwargs: Any) -> Routes:
    """Sequences of equal length; the first half is labelled `a`, the second `b` with other popular experts."""
    half = num_sequences // 2 * length
    num_experts = kwargs.setdefault("num_experts", 16)
    seed = kwargs.pop("seed", 0)
    first = skewed_ids(half, **kwargs, seed=seed)
    second = skewed_ids(num_sequences * length - half, **kwargs, seed=seed + 1, shift=num_experts // 2)
    return make_routes(
        np.concatenate([first, second]),
        name="skewed",
        phase=phase,
        offsets=np.arange(num_sequences + 1) * length,
        num_experts=num_experts,
        labels={"dataset": ("a",) * (num_sequences // 2) + ("b",) * (num_sequences - num_sequences // 2)},
    )
