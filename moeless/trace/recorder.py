"""A bounded recorder of expert loads: a ring of iterations whose memory is taken once, at the start.

Legend: L MoE layers, E experts, G ranks, T tokens, K experts a token, N iterations of the ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeless.errors import UsageError
from moeless.trace.loads import NO_PREDICTION, PHASES, LoadTrace
from moeless.trace.routes import Ids, Phase


class Recorder:
    """Records layer by layer, then closes the iteration. The oldest iterations are overwritten and counted.

    Ids of tokens are kept only when `token_capacity` is above 0. An iteration whose tokens have been overwritten is
    dropped with them, and one with more tokens than that is recorded without being kept at all.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        num_ranks: int,
        capacity: int,
        top_k: int = 0,
        token_capacity: int = 0,
    ) -> None:
        if min(num_layers, num_experts, num_ranks, capacity) < 1:
            raise UsageError(f"a recorder needs at least one layer, expert, rank and iteration, got {capacity=}")
        if token_capacity and not top_k:
            raise UsageError("recording token ids needs top_k")
        self.capacity, self.token_capacity = capacity, token_capacity
        self.num_overwritten = 0
        """Iterations that are no longer in the ring."""
        self._num_closed = 0
        self._num_tokens_seen = 0
        self._num_rows = num_rows = capacity + 1  # one more for the open iteration
        self._rank_counts_NLGE = np.zeros((num_rows, num_layers, num_ranks, num_experts), np.int32)
        self._predicted_NLE = np.full((num_rows, num_layers, num_experts), NO_PREDICTION, np.int32)
        self._ready_NLEG = np.zeros((num_rows, num_layers, num_experts, num_ranks), np.uint8)
        self._phases_N = np.zeros(num_rows, np.uint8)
        self._num_tokens_N = np.zeros(num_rows, np.int32)
        self._durations_s_N = np.zeros(num_rows, np.float64)
        self._first_token_N = np.zeros(num_rows, np.int64)
        dtype = np.min_scalar_type(num_experts - 1)
        self._ids_TLK: Ids = np.zeros((token_capacity, num_layers, top_k), dtype)
        self._sequences_T = np.zeros(token_capacity, np.int64)

    def record_layer(
        self, layer: int, counts_GE: ArrayLike, ready_EG: ArrayLike, predicted_E: ArrayLike | None = None
    ) -> None:
        """Note one layer of the open iteration: true counts by source rank, which replicas were ready for it, and
        what had been predicted for it."""
        row = self._num_closed % self._num_rows
        self._rank_counts_NLGE[row, layer] = counts_GE
        self._ready_NLEG[row, layer] = ready_EG
        if predicted_E is not None:
            self._predicted_NLE[row, layer] = predicted_E

    def record_tokens(self, ids_TLK: NDArray[Any], sequences_T: ArrayLike) -> None:
        """Note the ids of the open iteration's tokens and the request each belongs to; needs `token_capacity`."""
        num_tokens = len(ids_TLK)
        if num_tokens <= self.token_capacity:
            where = (self._num_tokens_seen + np.arange(num_tokens)) % self.token_capacity
            self._ids_TLK[where] = ids_TLK
            self._sequences_T[where] = sequences_T
        self._num_tokens_seen += num_tokens

    def end_iteration(self, *, phase: Phase, num_tokens: int, duration_s: float) -> None:
        """Close the open iteration. A layer that was not recorded counts as having had no tokens."""
        row = self._num_closed % self._num_rows
        self._phases_N[row] = PHASES.index(phase)
        self._num_tokens_N[row] = num_tokens
        self._durations_s_N[row] = duration_s
        self._num_closed += 1
        self.num_overwritten = max(0, self._num_closed - self.capacity)
        row = self._num_closed % self._num_rows
        self._rank_counts_NLGE[row] = 0
        self._predicted_NLE[row] = NO_PREDICTION
        self._ready_NLEG[row] = 0
        self._first_token_N[row] = self._num_tokens_seen

    def __len__(self) -> int:
        """Closed iterations in the ring."""
        return min(self._num_closed, self.capacity)

    def snapshot(self, name: str, metadata: Mapping[str, Any] | None = None) -> LoadTrace | None:
        """A copy of the closed iterations, oldest first; None before the first one is closed."""
        first = self._num_closed - len(self)
        if self.token_capacity:
            kept = self._num_tokens_seen - self.token_capacity
            while first < self._num_closed and self._first_token_N[first % self._num_rows] < kept:
                first += 1
        rows = np.arange(first, self._num_closed) % self._num_rows
        if not len(rows):
            return None
        predicted = self._predicted_NLE[rows]
        lost = {"num_overwritten": first}
        return LoadTrace(
            counts_ILE=self._rank_counts_NLGE[rows].sum(2, dtype=np.int32),
            rank_counts_ILGE=self._rank_counts_NLGE[rows],
            ready_ILEG=self._ready_NLEG[rows],
            predicted_ILE=predicted if (predicted != NO_PREDICTION).any() else None,
            phases_I=self._phases_N[rows],
            num_tokens_I=self._num_tokens_N[rows],
            durations_s_I=self._durations_s_N[rows],
            name=name,
            metadata={**(metadata or {}), **lost},
            **self._tokens(rows),
        )

    def _tokens(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Ids of the iterations in `rows`, laid end to end."""
        if not self.token_capacity:
            return {}
        starts = self._first_token_N[rows]
        ends = np.append(starts[1:], self._first_token_N[self._num_closed % self._num_rows])
        where = np.arange(starts[0], ends[-1]) % self.token_capacity
        return {
            "ids_TLK": self._ids_TLK[where],
            "sequences_T": self._sequences_T[where],
            "token_offsets": np.append(starts, ends[-1]) - starts[0],
        }
