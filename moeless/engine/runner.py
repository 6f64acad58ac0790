"""Runs one step of a model on one rank: lays the chunks side by side, computes them, and takes the next tokens.

The model is transformers' own; its attention is `models/attention.py` over `kv_cache.py`, and its rows are packed
[1, Q] without padding, because padding would be routed to experts too.

Legend: Q packed new tokens, S rows whose logits are needed, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from moeless.engine.kv_cache import KvCache
from moeless.engine.packing import Span, pack
from moeless.engine.sampling import sample, token_logprobs
from moeless.engine.scheduler import Chunk
from moeless.engine.sequence import Sequence
from moeless.errors import UnsupportedModelError
from moeless.models.attention import caches_latents, install_attention
from moeless.models.family import supports_packing

# Their frequencies depend on the longest sequence of the batch beyond this many positions, so that what a sequence
# computes would depend on its neighbours.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

_SMALL_STEP = 1 << 20
"""Multiplications with the widest matrix up to which a step runs on one thread."""


class ModelRunner:
    """A model ready for packed steps, and its key-value cache."""

    def __init__(self, model: PreTrainedModel, kv_tokens: int) -> None:
        """Take `model` over: from here on it only works through `step`.

        Raises:
            UnsupportedModelError: a layer carries a recurrent state or needs a cache of its own kind.
            CapacityError: `kv_tokens` is too small for anything.
        """
        family = model.config.model_type
        if not supports_packing(model):
            raise UnsupportedModelError(
                f"{family} models cannot be served: a layer carries a recurrent state; profile and finetune work"
            )
        latent = {m.layer_idx for m in model.modules() if caches_latents(m) and hasattr(m, "layer_idx")}
        self.model = model
        self.kv = KvCache(kv_tokens, frozenset(latent))  # type: ignore[arg-type]
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
        install_attention(model, self.kv)
        parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
        self._num_threads, self._widest = torch.get_num_threads(), _widest(model)
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.num_tokens_run = 0

    @torch.inference_mode()
    def step(self, chunks: Rows[Chunk], observe: Callable[[Rows[Chunk]], None] | None = None) -> list[Sequence]:
        """Compute the chunks; sequences whose last token is among them get their next one, and are given back.

        A sequence may be finished afterwards (`finish_reason`). `observe` is told the chunks in the order of their
        rows, once they are computed.
        """
        spans = [
            Span(extent=self.kv.extent(c.sequence.sequence_id), first=c.sequence.num_computed, num_new=c.num_new)
            for c in chunks
        ]
        order, batch = pack(spans, self.device)
        ordered = [chunks[i] for i in order]
        self.kv.start_step(batch)
        ids = np.fromiter((t for c in ordered for t in _new_tokens(c)), dtype=np.int64, count=len(batch.positions_Q))
        last_rows = np.cumsum([c.num_new for c in ordered]) - 1
        due = [i for i, c in enumerate(ordered) if c.is_last and c.sequence.num_output < c.sequence.max_tokens]
        scored = [(c, last_rows[i]) for i, c in enumerate(ordered) if c.sequence.wants_prompt_logprobs]
        score_rows = [np.arange(end - c.num_new + 1, end + 1) for c, end in scored]
        rows = np.concatenate([last_rows[due], *score_rows])
        _use_threads(1 if len(ids) * self._widest <= _SMALL_STEP else self._num_threads)
        logits_SV = self._forward(ids, batch.positions_Q, rows if len(rows) else last_rows[-1:])
        start = len(due)
        for chunk, _ in scored:
            _score_prompt(chunk, logits_SV[start : start + chunk.num_new])
            start += chunk.num_new
        ends = [c.sequence for c in ordered if c.is_last]
        self._advance([ordered[i].sequence for i in due], logits_SV[: len(due)], ordered)
        self.num_tokens_run += len(ids)
        if observe is not None:
            observe(ordered)
        return ends

    def _forward(self, ids: np.ndarray, positions_Q: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Logits [S, V] of the given rows."""
        keep_S = torch.from_numpy(rows).to(self.device)
        arguments: dict[str, Any] = {self._cache_argument: self.kv}
        output = self.model(
            input_ids=torch.from_numpy(ids)[None].to(self.device),
            position_ids=positions_Q[None],
            use_cache=True,
            logits_to_keep=keep_S,
            **arguments,
        )
        logits_SV: torch.Tensor = output.logits[0]
        return logits_SV if len(logits_SV) == len(rows) else logits_SV[keep_S]

    def _advance(self, due: list[Sequence], logits_SV: torch.Tensor, chunks: Rows[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_new
            if sequence.max_tokens == 0 and sequence.num_uncomputed == 0:
                sequence.finish_reason = "length"
        if not due:
            return
        sampled = sample(logits_SV, due)
        for sequence, token, logprobs in zip(due, sampled.tokens, sampled.logprobs, strict=True):
            if token is None:
                sequence.finish_reason = "error"
                continue
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            sequence.append(token)


def _widest(model: PreTrainedModel) -> int:
    """The most weights of a matrix; the first and last do not count, through which few numbers of a step go."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    left_out = {id(weight) for module in ends if module is not None for weight in module.parameters()}
    return max(math.prod(w.shape[-2:]) for w in model.parameters() if w.dim() > 1 and id(w) not in left_out)


def _use_threads(number: int) -> None:
    """Threads of torch's operations; set only when it changes, since that starts threads anew."""
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _new_tokens(chunk: Chunk) -> list[int]:
    first = chunk.sequence.num_computed
    return chunk.sequence.tokens[first : first + chunk.num_new]


def _score_prompt(chunk: Chunk, logits_SV: torch.Tensor) -> None:
    """Log-probabilities of the prompt tokens that follow the chunk's, those not known yet from before a preemption."""
    sequence, first = chunk.sequence, chunk.sequence.num_computed
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
    known = len(sequence.prompt_logprobs)
    end = min(first + chunk.num_new + 1, len(sequence.prompt))
    if known < end:
        tokens_S = torch.tensor(sequence.prompt[known:end], device=logits_SV.device)
        counts = [sequence.params.prompt_logprobs or 0] * len(tokens_S)
        sequence.prompt_logprobs += token_logprobs(logits_SV[known - 1 - first : end - 1 - first], tokens_S, counts)


def context_length(model: PreTrainedModel) -> int:
    """Positions up to which a sequence computes the same whatever stands beside it in the batch."""
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    for values in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if values.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, int(values.get("original_max_position_embeddings") or limit))
    return limit
