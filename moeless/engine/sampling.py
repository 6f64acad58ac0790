"""From logits to tokens, for a whole batch at once.

The random number behind a token is a hash of the request's seed and the token's position, so it depends on nothing
else in the batch, and a request that is computed again, here or on another rank, goes on as it would have.

Order of operations, as in vLLM: log-probabilities are the model's own; then min_tokens, logit_bias, penalties,
temperature, min_p, top_k, top_p.

Legend: S rows to sample, V vocabulary, L likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from moeless.engine.request import Logprob, SamplingParams, TokenLogprobs
from moeless.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens; None where a row's logits are not numbers."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]


def sample(logits_SV: torch.Tensor, sequences: Rows[Sequence]) -> Sampled:
    """The next token of each sequence from its row of logits."""
    raw_SV = logits_SV.float()
    edited_SV = _edit(raw_SV, sequences)
    chosen_S = edited_SV.argmax(-1)
    drawn = [i for i, s in enumerate(sequences) if s.params.temperature > 0]
    if drawn:
        chosen_S[drawn] = _draw(edited_SV[drawn], [sequences[i] for i in drawn])
    sound = raw_SV.gather(1, chosen_S[:, None])[:, 0].isfinite().tolist()
    tokens = [token if good else None for token, good in zip(chosen_S.tolist(), sound, strict=True)]
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    wanted = [i for i, s in enumerate(sequences) if s.params.logprobs is not None and tokens[i] is not None]
    if wanted:
        counts = [sequences[i].params.logprobs or 0 for i in wanted]
        for i, found in zip(wanted, token_logprobs(raw_SV[wanted], chosen_S[wanted], counts), strict=True):
            logprobs[i] = found
    return Sampled(tokens, logprobs)


def token_logprobs(logits_SV: torch.Tensor, tokens_S: torch.Tensor, counts: Rows[int]) -> list[TokenLogprobs]:
    """For each row the log-probability and rank of its token and of its `counts[row]` likeliest tokens."""
    logprobs_SV = logits_SV.float().log_softmax(-1)
    own_S1 = logprobs_SV.gather(1, tokens_S[:, None])
    ranks = ((logprobs_SV > own_S1).sum(-1) + 1).tolist()
    top_SL, ids_SL = logprobs_SV.topk(min(max(counts), logprobs_SV.shape[1]))
    rows = zip(tokens_S.tolist(), own_S1[:, 0].tolist(), ranks, top_SL.tolist(), ids_SL.tolist(), counts, strict=True)
    result = []
    for token, own, rank, values, ids, count in rows:
        found = {i: Logprob(v, r) for r, (i, v) in enumerate(zip(ids[:count], values[:count], strict=True), start=1)}
        result.append({token: Logprob(own, rank)} | found)
    return result


def _edit(logits_SV: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Logits after min_tokens, logit_bias and penalties; a copy if any applies."""
    short = [i for i, s in enumerate(sequences) if s.num_output < s.params.min_tokens]
    biased = [i for i, s in enumerate(sequences) if s.params.logit_bias]
    penalised = [i for i, s in enumerate(sequences) if s.params.has_penalties]
    if not (short or biased or penalised):
        return logits_SV
    edited_SV = logits_SV.clone()
    for i in biased:
        bias = sequences[i].params.logit_bias or {}
        values = torch.tensor(list(bias.values()), dtype=edited_SV.dtype, device=edited_SV.device)
        edited_SV[i].index_add_(0, torch.tensor(list(bias), device=edited_SV.device), values)
    if penalised:
        edited_SV[penalised] = _penalise(edited_SV[penalised], [sequences[i] for i in penalised])
    for i in short:
        params = sequences[i].params
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else sequences[i].eos_ids)}
        edited_SV[i, list(ends)] = float("-inf")
    return edited_SV


def _penalise(logits_SV: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    counts = torch.stack([_token_counts(s, logits_SV.shape[1], logits_SV.device) for s in sequences])
    output_SV, seen_SV = counts[:, 1], counts.sum(1) > 0
    repetition = _column([s.params.repetition_penalty for s in sequences], logits_SV)
    frequency = _column([s.params.frequency_penalty for s in sequences], logits_SV)
    presence = _column([s.params.presence_penalty for s in sequences], logits_SV)
    repeated_SV = torch.where(logits_SV > 0, logits_SV / repetition, logits_SV * repetition)
    penalised_SV = torch.where(seen_SV, repeated_SV, logits_SV)
    return penalised_SV - frequency * output_SV - presence * (output_SV > 0)


def _token_counts(sequence: Sequence, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[2, V] how often each token is in the prompt and in the output, kept up to date from step to step."""
    counts, num_counted = sequence.token_counts or (None, 0)
    if counts is None:
        prompt = torch.bincount(torch.tensor(sequence.prompt, dtype=torch.long), minlength=vocab_size)
        counts = torch.stack([prompt, torch.zeros_like(prompt)]).to(device)
    for token in sequence.tokens[len(sequence.prompt) + num_counted :]:
        counts[1, token] += 1
    sequence.token_counts = (counts, sequence.num_output)
    return counts


def _draw(logits_SV: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Tokens [S] by inversion of the cumulative distribution.

    Rows with a filter take tokens from the likeliest down, others in the order of the vocabulary, whatever other rows
    do, so that a row's token does not depend on the batch.
    """
    params = [s.params for s in sequences]
    scaled_SV = logits_SV / _column([max(p.temperature, 1e-5) for p in params], logits_SV)
    uniform = _uniform([s.seed for s in sequences], [s.num_output for s in sequences])
    uniform_S1 = torch.from_numpy(uniform).to(logits_SV.device)[:, None]
    tokens_S = torch.empty(len(sequences), dtype=torch.long, device=logits_SV.device)
    filtered = [i for i, p in enumerate(params) if p.top_p < 1 or p.top_k > 0 or p.min_p > 0]
    plain = sorted(set(range(len(params))).difference(filtered))
    if plain:
        tokens_S[plain] = _invert(scaled_SV[plain].softmax(-1), uniform_S1[plain])
    if filtered:
        sorted_SV, ids_SV = scaled_SV[filtered].sort(stable=True, dim=-1, descending=True)
        kept_SV = _filter(sorted_SV, [params[i] for i in filtered])
        picked_S = _invert(kept_SV, uniform_S1[filtered])
        tokens_S[filtered] = ids_SV.gather(1, picked_S[:, None])[:, 0]
    return tokens_S


def _filter(sorted_SV: torch.Tensor, params: Rows[SamplingParams]) -> torch.Tensor:
    """Probabilities of descending logits with 0 for what min_p, top_k and top_p leave out; the first is always kept."""
    num_tokens = sorted_SV.shape[1]
    probs_SV = sorted_SV.softmax(-1)
    rank_V = torch.arange(num_tokens, device=sorted_SV.device)
    top_k = _column([p.top_k if p.top_k > 0 else num_tokens for p in params], sorted_SV)
    kept_SV = (probs_SV >= _column([p.min_p for p in params], sorted_SV) * probs_SV[:, :1]) & (rank_V < top_k)
    probs_SV = torch.where(kept_SV, probs_SV, 0).double()
    before_SV = probs_SV.cumsum(-1) - probs_SV
    top_p = _column([p.top_p if p.top_p < 1 else 2.0 for p in params], sorted_SV)
    return torch.where((before_SV < top_p * probs_SV.sum(-1, keepdim=True)) | (rank_V == 0), probs_SV, 0)


def _invert(probs_SV: torch.Tensor, uniform_S1: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative probability is over the uniform number in [0, 1); need not be normalised."""
    cumulative_SV = probs_SV.double().cumsum(-1)
    picked_S = torch.searchsorted(cumulative_SV, uniform_S1 * cumulative_SV[:, -1:], right=True)[:, 0]
    return picked_S.clamp_(max=probs_SV.shape[1] - 1)


def _column(values: Rows[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _uniform(seeds: Rows[int], positions: Rows[int]) -> np.ndarray:
    """Numbers in [0, 1) from (seed, position), by two rounds of the splitmix64 finaliser."""
    with np.errstate(over="ignore"):
        mixed = _mix(np.array([s % 2**64 for s in seeds], dtype=np.uint64)) + np.array(positions, dtype=np.uint64)
        return (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's completion number `index`."""
    return int(_mix(np.array([seed % 2**64], dtype=np.uint64))[0]) ^ index if index else seed % 2**64
