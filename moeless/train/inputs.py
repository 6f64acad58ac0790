"""What the predictor of one layer reads and is to say, over all captured rows: `SourceRows` and `Truth`.

Legend: T tokens, K experts a token, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from moeless.models.gate import Gate, Scoring
from moeless.models.predictor import Source
from moeless.train.rows import DECODE
from moeless.train.store import CaptureStore

CHANNEL_OF: dict[Source, str] = {"gate-input": "gate_input", "pre-attention": "layer_input"}


class SourceRows:
    """One channel of one layer as pages of at most `budget_bytes` (or one shard, where that is more).

    A channel that fits in one page is read once and kept on `device`; a larger one is read anew on each pass.
    """

    def __init__(
        self,
        store: CaptureStore,
        channel: str,
        layer: int,
        *,
        budget_bytes: int,
        device: torch.device,
        prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Rows of `channel` of `layer`, each page put through `prepare` once it is on `device`."""
        self._store, self._channel, self._layer = store, channel, layer
        self._budget_bytes, self._device, self._prepare = budget_bytes, device, prepare
        self._whole: torch.Tensor | None = None

    def pages(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first row, rows [n, H]) in order."""
        if self._whole is not None:
            yield 0, self._whole
            return
        first = 0
        for rows in self._joined():
            page = self._on_device(rows)
            if first == 0 and len(rows) == self._num_rows:
                self._whole = page
            yield first, page
            first += len(rows)

    @property
    def _num_rows(self) -> int:
        return len(self._store.column("phases"))

    def _joined(self) -> Iterator[torch.Tensor]:
        """The store's parts, joined up to the budget."""
        waiting: list[torch.Tensor] = []
        num_bytes = 0
        for part in self._store.parts(self._channel, self._layer):
            part_bytes = part.numel() * part.element_size()
            if waiting and num_bytes + part_bytes > self._budget_bytes:
                yield torch.cat(waiting)
                waiting, num_bytes = [], 0
            waiting.append(part)
            num_bytes += part_bytes
        if waiting:
            yield torch.cat(waiting)

    @torch.no_grad()
    def _on_device(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(self._device)
        return rows if self._prepare is None else self._prepare(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What really happened at one layer."""

    ids_TK: torch.Tensor
    """Experts used, int64."""
    scores_TE: torch.Tensor
    """The target router's distribution over all experts on its true input, float32: what soft targets are."""

    @staticmethod
    def read(store: CaptureStore, gate: Gate, layer: int, *, budget_bytes: int, device: torch.device) -> Truth:
        """Collect a layer's truth from a capture; only the distributions, not the inputs, stay in memory."""
        own = SourceRows(store, "gate_input", layer, budget_bytes=budget_bytes, device=device)
        scores = [log_scores(gate.logits(gate.linear_input(x_TH)), gate.scoring).exp() for _, x_TH in own.pages()]
        ids_TK = store.column("ids", layer).long().to(device)
        return Truth(ids_TK=ids_TK, scores_TE=torch.cat(scores))


def log_scores(logits_TE: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Logarithm of each expert's share of the scores that a router chooses by, [T, E]; differentiable."""
    if scoring == "softmax":
        return F.log_softmax(logits_TE, dim=-1)
    return F.log_softmax(F.logsigmoid(logits_TE), dim=-1)


def held_out_iterations(
    phases_N: np.ndarray, iterations_N: np.ndarray, batch_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(iteration, phase) of held-out rows, for the metrics that compare loads.

    A packed prefill batch holds documents of all parts; its held-out rows alone would be a small batch. So held-out
    prefill rows are packed anew, `batch_tokens` at a time, as they would be if only they were served. Decode rows keep
    their step.
    """
    decode_N = phases_N == DECODE
    packed_N = (np.cumsum(~decode_N) - 1) // batch_tokens
    first_step = int(packed_N[~decode_N].max(initial=-1)) + 1
    steps_N = np.where(decode_N, first_step + iterations_N.astype(np.int64), packed_N)
    return np.unique(steps_N, return_inverse=True)[1], phases_N
