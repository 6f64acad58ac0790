"""Sampling: each filter against its definition, independence of the batch, and the distribution itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from moeless.engine.request import SamplingParams
from moeless.engine.sampling import Sampled, _draw, _edit, _filter, _uniform, sample, sequence_seed, token_logprobs
from moeless.engine.sequence import Sequence
from moeless.errors import UsageError
from tests.engine.serving import make_sequence

VOCAB = 50


def sequence(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (3, 4), **params: Any) -> Sequence:
    made = make_sequence(0, prompt, SamplingParams(max_tokens=64, **params), eos_ids=(2,))
    made.tokens += output
    return made


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def kept(row: torch.Tensor, **params: Any) -> set[int]:
    """Tokens a filter leaves, by the fast path."""
    sorted_SV, ids_SV = row[None].sort(stable=True, dim=-1, descending=True)
    probs_SV = _filter(sorted_SV, [SamplingParams(**params)])
    return set(ids_SV[0][probs_SV[0] > 0].tolist())


def kept_by_definition(row: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """min_p, then top_k, then the shortest prefix whose share of what is left reaches top_p."""
    probs = row.double().softmax(0).tolist()
    order = sorted(range(VOCAB), key=lambda i: (-probs[i], i))
    order = [i for i in order if probs[i] >= min_p * max(probs)]
    order = order[:top_k] if top_k > 0 else order
    total, taken, result = sum(probs[i] for i in order), 0.0, set()
    for i in order:
        if taken >= top_p * total and result:
            break
        result.add(i)
        taken += probs[i]
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.5},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 1e-9},
        {"top_k": -1, "top_p": 0.99},
    ],
)
def test_filters_keep_what_their_definition_keeps(params: dict[str, Any]) -> None:
    for row in logits(20):
        assert kept(row, **params) == kept_by_definition(row, **params)


@pytest.mark.parametrize("params", [{}, {"top_k": 6}, {"top_p": 0.8}, {"temperature": 0.5}])
def test_tokens_follow_the_distribution(params: dict[str, Any]) -> None:
    row, number = logits(seed=3)[0], 4_000
    sequences = [make_sequence(0, (3,), SamplingParams(seed=i, **params)) for i in range(number)]
    tokens = _draw(row.expand(number, -1), sequences)
    allowed = kept_by_definition(row, params.get("top_k", 0), params.get("top_p", 1.0))
    probs = (row.double() / params.get("temperature", 1.0)).softmax(0)
    expected = np.array([probs[i] if i in allowed else 0.0 for i in range(VOCAB)])
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert not counts[expected == 0].any()
    common = expected * number / expected.sum() >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * number / expected.sum()
    assert chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4


def test_a_request_does_not_depend_on_its_batch() -> None:
    rows = logits(6, seed=5)
    mixed = [
        sequence(seed=11, temperature=0.9),
        sequence(seed=12, top_p=0.8),
        sequence(temperature=0),
        sequence(seed=13, top_k=4, repetition_penalty=1.3, output=(5, 6)),
        sequence(seed=14, min_p=0.05, logit_bias={7: 3.0}),
        sequence(seed=15, temperature=1.4),
    ]
    together = sample(rows, mixed).tokens
    alone = [sample(rows[i : i + 1], [s]).tokens[0] for i, s in enumerate(mixed)]
    backwards = sample(rows.flip(0), mixed[::-1]).tokens[::-1]
    assert together == alone == backwards


def test_positions_seeds_and_completions_draw_different_numbers() -> None:
    positions = _uniform([7] * 1_000, list(range(1_000)))
    seeds = _uniform(list(range(1_000)), [0] * 1_000)
    for numbers in (positions, seeds):
        assert len(set(numbers.tolist())) == 1_000
        assert ((numbers >= 0) & (numbers < 1)).all()
        assert abs(numbers.mean() - 0.5) < 0.05
    assert len({sequence_seed(7, i) for i in range(100)}) == 100
    assert sequence_seed(7, 0) == 7
    assert sequence_seed(-1, 0) == 2**64 - 1


def test_penalties_are_those_of_their_definition() -> None:
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.7}
    made = sequence(output=(5, 5, 6), prompt=(3, 5), **params)
    row = logits(seed=2)
    expected = row[0].clone()
    for token in {3, 5, 6}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in {5: 2, 6: 1}.items():
        expected[token] -= 0.3 * count + 0.7
    assert torch.allclose(_edit(row, [made])[0], expected)
    made.tokens.append(9)  # counts are kept up to date from step to step
    expected[9] = (row[0, 9] / 1.5 if row[0, 9] > 0 else row[0, 9] * 1.5) - 1.0
    assert torch.allclose(_edit(row, [made])[0], expected)


def test_bias_and_min_tokens() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 2] = 9.0
    row[0, 8] = 8.0
    assert sample(row, [sequence(temperature=0)]).tokens == [2]
    assert sample(row, [sequence(temperature=0, min_tokens=1, stop_token_ids=[8])]).tokens != [8]
    assert sample(row, [sequence(temperature=0, min_tokens=1)]).tokens == [8]
    assert sample(row, [sequence(temperature=0, min_tokens=1, output=(5,))]).tokens == [2]
    assert sample(row, [sequence(temperature=0, min_tokens=1, ignore_eos=True)]).tokens == [2]
    assert sample(row, [sequence(temperature=0, logit_bias={30: 10.0, 2: -5.0})]).tokens == [30]
    assert row[0, 30] == 0, "the logits themselves stay as they are"


def test_logprobs_are_the_models_own_and_hold_the_chosen_token() -> None:
    row = logits(seed=4)
    chosen = sample(row, [sequence(temperature=0, logprobs=3, logit_bias={9: 100.0})])
    assert chosen.tokens == [9]
    found = chosen.logprobs[0]
    assert found is not None
    reference = row[0].double().log_softmax(0)
    order = sorted(range(VOCAB), key=lambda i: -reference[i])
    assert set(found) == {9, *order[:3]}
    for token, entry in found.items():
        assert entry.rank == order.index(token) + 1
        assert math.isclose(entry.logprob, reference[token], abs_tol=1e-5)
    assert set(token_logprobs(row, torch.tensor([order[0]]), [0])[0]) == {order[0]}


def test_rows_that_are_not_numbers_are_told_apart() -> None:
    rows = logits(3)
    rows[1] = float("nan")
    greedy, drawn = sequence(temperature=0), sequence(seed=1, top_p=0.9)
    assert [t is None for t in sample(rows, [greedy] * 3).tokens] == [False, True, False]
    result = sample(rows, [drawn] * 3)
    assert isinstance(result, Sampled)
    assert [t is None for t in result.tokens] == [False, True, False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1"),
        ({"n": 0}, "n must be at least 1"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is over max_tokens 4"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": 1_000}, "logprobs must be between 0 and 100"),
        ({"logit_bias": {1: math.inf}}, "logit_bias must be finite"),
        ({"stop": ["a", ""]}, "stop must not have an empty string"),
    ],
)
def test_bad_parameters_name_the_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**values)
