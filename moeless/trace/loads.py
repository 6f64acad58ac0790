"""Expert loads of iterations as they ran: how many tokens each expert of each layer got.

Legend: I iterations, L MoE layers, E experts, G ranks, T tokens, K experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError
from moeless.trace.routes import Ids, Phase, Routes, make_routes

PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed")

NO_PREDICTION = -1
"""Fills the predicted counts of a layer for which nothing was predicted."""


@dataclass(frozen=True, kw_only=True)
class LoadTrace:
    """I iterations of L layers.

    `counts_ILE` are tokens; a layer's sum is its tokens times k. `predicted_ILE` are the counts predicted before the
    layer ran, `NO_PREDICTION` throughout a layer without one. `rank_counts_ILGE` says which rank the tokens came from
    and sums to `counts_ILE` over G. With `ids_TLK`, iteration i holds the tokens `token_offsets[i]:token_offsets[i+1]`
    and `sequences_T` says which request each belongs to, so that batches can be composed anew.
    """

    counts_ILE: NDArray[np.int32]
    phases_I: NDArray[np.uint8]
    """Index into `PHASES`."""
    num_tokens_I: NDArray[np.int32]
    name: str
    predicted_ILE: NDArray[np.int32] | None = None
    rank_counts_ILGE: NDArray[np.int32] | None = None
    ready_ILEG: NDArray[np.uint8] | None = None
    """1 where a replica was ready when its layer ran."""
    durations_s_I: NDArray[np.float64] | None = None
    ids_TLK: Ids | None = None
    token_offsets: NDArray[np.int64] | None = None
    sequences_T: NDArray[np.int64] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: model, top_k, balancer, number of iterations that the recorder's ring has overwritten."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_trace(self)

    @property
    def num_iterations(self) -> int:
        return int(self.counts_ILE.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.counts_ILE.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.counts_ILE.shape[2])

    def select(self, *, num_iterations: int | None = None, layers: tuple[int, ...] | None = None) -> LoadTrace:
        """Loads and predictions of the first iterations, or of some layers only; tokens and ranks are left out."""
        cut, keep = slice(0, num_iterations), list(range(self.num_layers) if layers is None else layers)
        return replace(
            self,
            counts_ILE=self.counts_ILE[cut, keep],
            predicted_ILE=None if self.predicted_ILE is None else self.predicted_ILE[cut, keep],
            phases_I=self.phases_I[cut],
            num_tokens_I=self.num_tokens_I[cut],
            durations_s_I=None if self.durations_s_I is None else self.durations_s_I[cut],
            rank_counts_ILGE=None,
            ready_ILEG=None,
            ids_TLK=None,
            token_offsets=None,
            sequences_T=None,
        )

    def to_routes(self) -> Routes:
        """The tokens regrouped by request, in the order they ran.

        Raises:
            DataError: the trace has counts only.
        """
        if self.ids_TLK is None or self.sequences_T is None:
            raise DataError(
                f"{self.name}: has counts only, no expert ids of tokens, so batches cannot be composed anew"
            )
        order = np.argsort(self.sequences_T, kind="stable")
        _, lengths = np.unique(self.sequences_T, return_counts=True)
        phases = set(self.phases_I.tolist())
        return make_routes(
            self.ids_TLK[order],
            name=self.name,
            phase=PHASES[phases.pop()] if len(phases) == 1 else "mixed",
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            num_experts=self.num_experts,
            notes=self.notes,
        )


def make_loads(
    counts_ILE: NDArray[Any],
    *,
    name: str,
    phase: Phase = "mixed",
    top_k: int | None = None,
    notes: tuple[str, ...] = (),
) -> LoadTrace:
    """Wrap bare counts. With `top_k` the tokens of an iteration are known; without it they are its assignments.

    Raises:
        DataError: counts that are not whole, negative, or too large, named by iteration, layer and expert.
    """
    counts = np.asarray(counts_ILE)
    if counts.ndim != 3 or 0 in counts.shape or counts.dtype.kind not in "iuf":
        raise DataError(
            f"{name}: counts must be numbers [iterations, layers, experts], got {counts.dtype} {counts.shape}"
        )
    bad = ~((counts >= 0) & (counts < 2**31) & (counts == np.floor(counts)))
    if bad.any():
        i, layer, e = np.argwhere(bad)[0]
        raise DataError(
            f"{name}: iteration {i}, layer {layer}, expert {e}: {counts[i, layer, e]} is not a whole count below 2^31"
        )
    whole = counts.astype(np.int32)
    if not whole.any():
        raise DataError(f"{name}: every count is zero, so there is no load to look at")
    if top_k is None:
        notes = (*notes, "k is not in the file: tokens of an iteration are given as its assignments")
    tokens = whole[:, 0].sum(-1, dtype=np.int64) // (top_k or 1)
    return LoadTrace(
        counts_ILE=whole,
        phases_I=np.full(len(whole), PHASES.index(phase), np.uint8),
        num_tokens_I=tokens.astype(np.int32),
        name=name,
        metadata={} if top_k is None else {"top_k": top_k},
        notes=notes,
    )


def check_trace(trace: LoadTrace) -> None:
    """Shapes and sums that every trace keeps.

    Raises:
        DataError: naming the array, and the iteration where one is wrong.
    """
    shape, name = trace.counts_ILE.shape, trace.name
    if len(shape) != 3 or 0 in shape:
        raise DataError(f"{name}: counts must be [iterations, layers, experts], all at least 1; got {shape}")
    for key, array in (
        ("phases", trace.phases_I),
        ("num_tokens", trace.num_tokens_I),
        ("durations", trace.durations_s_I),
    ):
        if array is not None and array.shape != shape[:1]:
            raise DataError(f"{name}: {key} has shape {array.shape}, must be {shape[:1]}")
    if trace.phases_I.max() >= len(PHASES):
        raise DataError(f"{name}: phase {trace.phases_I.max()} is not one of 0..{len(PHASES) - 1}")
    if trace.predicted_ILE is not None and trace.predicted_ILE.shape != shape:
        raise DataError(f"{name}: predicted counts have shape {trace.predicted_ILE.shape}, must be {shape}")
    if trace.rank_counts_ILGE is not None:
        wrong = np.argwhere((trace.rank_counts_ILGE.sum(2) != trace.counts_ILE).any((1, 2)))
        if len(wrong):
            raise DataError(f"{name}: iteration {int(wrong[0, 0])}: counts by rank do not sum to the counts")
    ready = trace.ready_ILEG
    if ready is not None and (ready.ndim != 4 or ready.shape[:3] != shape):
        raise DataError(f"{name}: ready replicas have shape {ready.shape}, must be {(*shape, 'ranks')}")
    if trace.ids_TLK is not None:
        bounds, sequences = trace.token_offsets, trace.sequences_T
        if bounds is None or sequences is None or len(bounds) != shape[0] + 1:
            raise DataError(f"{name}: expert ids need token_offsets of {shape[0] + 1} bounds, and sequences")
        if len(sequences) != len(trace.ids_TLK) or int(bounds[-1]) != len(sequences) or bounds[0] != 0:
            raise DataError(f"{name}: {len(trace.ids_TLK)} tokens of ids do not fit token_offsets and sequences")
