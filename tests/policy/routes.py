"""Real routing as counts, for the tests that check the planner's quality.

Legend: I iterations, L layers, E experts. The data folder is `MOELESS_DATA`, or `shared/data` beside the checkout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

DATA = Path(os.environ.get("MOELESS_DATA", Path(__file__).parents[3] / "shared" / "data"))
GPT_OSS = DATA / "routing" / "gpt-oss-20b" / "gpt_oss_20b_decode_topk_all.npz"
DEEPSEEK = DATA / "routing" / "deepseek-v2-lite" / "dsv2lite_chat_prefill_topk_prompts_1_1000.npz"
MIXTRAL = DATA / "routing" / "mixtral-8x7b" / "mixtral_instruct_fp8_humaneval_2problems_routing.jsonl"


def require(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} is not in MOELESS_DATA")
    return path


def decode_counts(num_streams: int, num_iterations: int, seed: int, dataset: str = "") -> np.ndarray:
    """Continuous batching of `num_streams` gpt-oss sequences, each from a random point at first: [I, 24, 32].

    Sequences that fell into repetition are left out; `dataset` keeps those whose data set's name contains it.
    """
    rng = np.random.default_rng(seed)
    with np.load(require(GPT_OSS)) as z:
        experts, offsets, repetition, names = z["experts"], z["offsets"], z["repetition"], z["dataset"]
    lengths = np.diff(offsets)
    usable = np.flatnonzero(~repetition & (lengths > 50) & np.array([dataset in str(name) for name in names]))
    at = end = np.empty(0, np.int64)
    counts = []
    for iteration in range(num_iterations):
        chosen = rng.choice(usable, num_streams - len(at))
        start = offsets[chosen]
        if iteration == 0:
            start = start + (rng.random(len(chosen)) * lengths[chosen] * 0.9).astype(np.int64)
        at, end = np.concatenate([at, start]), np.concatenate([end, offsets[chosen + 1]])
        counts.append(count_experts(experts[at], 32))
        at = at + 1
        at, end = at[at < end], end[at < end]
    return np.stack(counts)


def prefill_counts(num_prompts: int, num_iterations: int) -> np.ndarray:
    """`num_prompts` DeepSeek-V2-Lite prompts a batch, in order: [I, 26, 64]."""
    with np.load(require(DEEPSEEK)) as z:
        experts, offsets = z["experts"], z["offsets"]
    num = len(offsets) - 1
    batches = [[(i * num_prompts + j) % num for j in range(num_prompts)] for i in range(num_iterations)]
    rows = [np.concatenate([experts[offsets[p] : offsets[p + 1]] for p in batch]) for batch in batches]
    return np.stack([count_experts(tokens, 64) for tokens in rows])


def mixtral_counts(chunk: int) -> np.ndarray:
    """Mixtral-8x7B on HumanEval in chunks of `chunk` tokens: [I, 32, 8]."""
    layers: dict[int, list[list[int]]] = {}
    with require(MIXTRAL).open() as lines:
        for line in lines:
            record = json.loads(line)
            layers.setdefault(record["layer"], []).append(record["experts"])
    num = min(map(len, layers.values()))
    tokens = np.stack([np.array(layers[layer][:num]) for layer in sorted(layers)], axis=1)
    return np.stack([count_experts(tokens[i : i + chunk], 8) for i in range(0, num - chunk + 1, chunk)])


def count_experts(experts_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens of each expert by layer, [L, E]."""
    num_layers = experts_TLK.shape[1]
    flat = experts_TLK.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)
