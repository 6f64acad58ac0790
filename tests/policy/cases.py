"""Random loads and placements for the policy tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from moeless.policy.cost import CLUSTERS, MODELS, CostModel, cost_of
from moeless.policy.seeds import ring
from moeless.policy.types import EpShape, Placement

GPT_OSS_H200 = cost_of(MODELS["gpt-oss-20b"], CLUSTERS["8xh200"])


def skewed_loads(rng: np.random.Generator, num_experts: int, num_tokens: int) -> np.ndarray:
    """Token counts of experts whose popularity follows a gamma law of random shape."""
    popularity = rng.gamma(rng.uniform(0.5, 2), 1, num_experts) + 1e-6
    return rng.multinomial(num_tokens, popularity / popularity.sum()).astype(np.int64)


def ring_cases(shape: EpShape, num: int, seed: int = 0) -> Iterator[tuple[np.ndarray, Placement]]:
    """Loads of 64 to 32,768 tokens, and a ring made from loads that are wrong by up to half."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        counts_E = skewed_loads(rng, shape.num_experts, int(np.exp(rng.uniform(np.log(64), np.log(32768)))))
        yield counts_E, ring((counts_E * rng.uniform(0.5, 1.5, shape.num_experts)).tolist(), shape)


@st.composite
def splits(draw: st.DrawFn) -> tuple[np.ndarray, Placement, int]:
    """Counts, a placement with every expert on one to four ranks, and the number of ranks."""
    num_ranks = draw(st.integers(1, 8))
    num_experts = draw(st.integers(1, 12))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=min(4, num_ranks))
    placement = tuple(tuple(sorted(draw(ranks))) for _ in range(num_experts))
    top = draw(st.sampled_from([1, 3, 200, 5000]))
    counts = draw(st.lists(st.integers(0, top), min_size=num_experts, max_size=num_experts))
    return np.array(counts, np.int64), placement, num_ranks


@st.composite
def costs(draw: st.DrawFn) -> CostModel:
    """Cost models with and without each of their terms."""
    floor, alpha, beta = draw(st.sampled_from([0.0, 10.0])), draw(st.sampled_from([0.0, 0.08, 1.0])), 0.0
    if floor == alpha == 0 or draw(st.booleans()):
        beta = 0.025
    return CostModel(floor_us=floor, alpha_us=alpha, beta_us=beta)


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], EpShape]:
    """Loads and sizes, more ranks than experts and uneven division among them."""
    num_experts, num_ranks = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    extra = draw(st.integers(0, 2 * num_experts))
    top = draw(st.sampled_from([1, 10, 1000]))
    loads = draw(st.lists(st.integers(0, top), min_size=num_experts, max_size=num_experts))
    return loads, EpShape(num_experts, num_ranks, num_experts + extra)
