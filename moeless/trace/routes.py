"""Expert ids of every token of whole sequences, from which batches of any size and mix can be composed.

Legend: T tokens, L MoE layers, K experts a token, S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeless.errors import DataError, UsageError

Phase = Literal["prefill", "decode", "mixed"]
Ids = NDArray[np.unsignedinteger[Any]]
Ints = NDArray[np.integer[Any]]

MAX_EXPERTS = 4_096


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Routed expert ids of S sequences laid end to end.

    Sequence s owns the tokens `offsets[s]:offsets[s + 1]`. `labels` holds one string a sequence under each key (such as
    `dataset`), which is what a workload switch selects by.
    """

    ids_TLK: Ids
    offsets: NDArray[np.int64]
    num_experts: int
    phase: Phase
    name: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What a reader of any number made from these routes should know."""

    @property
    def num_tokens(self) -> int:
        return int(self.ids_TLK.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.ids_TLK.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids_TLK.shape[2])

    @property
    def lengths_S(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.offsets)

    def select_layers(self, layers: tuple[int, ...]) -> Routes:
        """The same tokens, only these layers.

        Raises:
            UsageError: a layer that is not there.
        """
        if max(layers) >= self.num_layers:
            raise UsageError(f"layer {max(layers)} is not in {self.name!r}, which has layers 0-{self.num_layers - 1}")
        return replace(self, ids_TLK=np.ascontiguousarray(self.ids_TLK[:, list(layers)]))

    def sequences_labelled(self, text: str) -> NDArray[np.int64]:
        """Sequences of which some label contains `text`.

        Raises:
            DataError: the trace has no labels, or none that contains it.
        """
        columns = [np.array(values) for values in self.labels.values()]
        found = np.zeros(len(self.offsets) - 1, bool)
        for column in columns:
            found |= np.char.find(column, text) >= 0
        if not found.any():
            known = sorted({value for values in self.labels.values() for value in values})
            shown = ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")
            raise DataError(f"no sequence of {self.name!r} is labelled {text!r}; its labels: {shown or 'none'}")
        return np.flatnonzero(found)


def make_routes(
    ids_TLK: Ints,
    *,
    name: str,
    phase: Phase,
    offsets: Ints | None = None,
    num_experts: int | None = None,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    notes: tuple[str, ...] = (),
) -> Routes:
    """Check ids and offsets and pack them.

    Args:
        ids_TLK: integer expert ids.
        offsets: [S + 1] sequence bounds; None makes one sequence of all tokens.
        num_experts: experts a layer; None takes the largest id seen plus one, and says so in the notes.

    Raises:
        DataError: naming the first token and layer that cannot be right.
    """
    _check_ids(ids_TLK, name, num_experts)
    num_tokens = len(ids_TLK)
    bounds = np.array([0, num_tokens] if offsets is None else offsets, dtype=np.int64)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens or (np.diff(bounds) < 0).any():
        raise DataError(f"{name}: offsets must ascend from 0 to the number of tokens, {num_tokens}")
    for key, values in (labels or {}).items():
        if len(values) != len(bounds) - 1:
            raise DataError(f"{name}: label {key!r} has {len(values)} values for {len(bounds) - 1} sequences")
    largest = int(ids_TLK.max())
    if num_experts is None:
        num_experts = largest + 1
        notes = (*notes, f"number of experts taken from the largest id seen: {num_experts}")
    packed = np.ascontiguousarray(ids_TLK, dtype=np.min_scalar_type(max(num_experts - 1, largest)))
    return Routes(
        ids_TLK=packed,
        offsets=bounds,
        num_experts=num_experts,
        phase=phase,
        name=name,
        labels=dict(labels or {}),
        notes=notes,
    )


def drop_sequences(routes: Routes, drop_S: NDArray[np.bool_], reason: str) -> Routes:
    """The routes without the marked sequences, with a note of how many went and why.

    Raises:
        DataError: nothing would be left.
    """
    if drop_S.all():
        raise DataError(f"{routes.name}: all {len(drop_S)} sequences are left out ({reason})")
    if not drop_S.any():
        return routes
    keep_T = np.repeat(~drop_S, routes.lengths_S)
    offsets = np.concatenate([[0], np.cumsum(routes.lengths_S[~drop_S])])
    labels = {k: tuple(np.array(v)[~drop_S].tolist()) for k, v in routes.labels.items()}
    note = f"{int(drop_S.sum())} of {len(drop_S)} sequences left out ({reason})"
    return replace(routes, ids_TLK=routes.ids_TLK[keep_T], offsets=offsets, labels=labels, notes=(*routes.notes, note))


def count_experts(ids_TLK: Ints, num_experts: int) -> NDArray[np.int32]:
    """How many of the tokens go to each expert of each layer, [L, E]; every layer sums to T * K."""
    num_layers = ids_TLK.shape[1]
    flat = ids_TLK.astype(np.int64) + (np.arange(num_layers) * num_experts)[:, None]
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1).astype(np.int32)


def _check_ids(ids_TLK: Ints, name: str, num_experts: int | None) -> None:
    if ids_TLK.ndim != 3 or not np.issubdtype(ids_TLK.dtype, np.integer) or 0 in ids_TLK.shape:
        raise DataError(
            f"{name}: expert ids must be integers [tokens, layers, k], all at least 1; "
            f"got {ids_TLK.dtype} {ids_TLK.shape}"
        )
    top = (num_experts or MAX_EXPERTS) - 1
    if int(ids_TLK.min()) < 0 or int(ids_TLK.max()) > top:
        token, layer, _ = np.argwhere((ids_TLK < 0) | (ids_TLK > top))[0]
        ids = ids_TLK[token, layer].tolist()
        raise DataError(f"{name}: token {token}, layer {layer}: ids {ids} are not all in 0..{top}")
    top_k = ids_TLK.shape[2]
    for i in range(top_k):
        for j in range(i):
            same = ids_TLK[:, :, i] == ids_TLK[:, :, j]
            if same.any():
                token, layer = np.argwhere(same)[0]
                ids = ids_TLK[token, layer].tolist()
                raise DataError(f"{name}: token {token}, layer {layer}: expert {ids[i]} twice among {ids}")
