"""Laying out one step: which sequences attend together, and where each new token goes.

Sequences with the same number of new tokens are grouped by the size of their extent. Where extents stand side by side
in the store the group reads them as one view; decoding stragglers are gathered by row numbers, others attend alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from moeless.engine.kv_cache import Extent
from moeless.models.attention import AttentionGroup, PackedBatch

MIN_RUN = 4
"""Extents side by side that are worth an attention call of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of a sequence that one step computes."""

    extent: Extent
    first: int
    """Position of the first new token."""
    num_new: int

    @property
    def num_keys(self) -> int:
        """Keys that its last new token sees under plain causal attention."""
        return self.first + self.num_new


def pack(spans: Sequence[Span], device: torch.device) -> tuple[list[int], PackedBatch]:
    """The order in which to lay `spans` side by side (indices into it), and the batch they make."""
    by_size = sorted(range(len(spans)), key=lambda i: (spans[i].num_new, spans[i].extent))
    groups_of: list[tuple[list[int], bool]] = []
    for (num_new, _), bucket in groupby(by_size, key=lambda i: (spans[i].num_new, spans[i].extent.size)):
        groups_of += _split_bucket(list(bucket), spans, gather=num_new == 1)

    groups, order, first_row = [], [], 0
    for members, side_by_side in groups_of:
        chosen = [spans[i] for i in members]
        groups.append(_group(chosen, first_row, side_by_side, device))
        first_row += len(members) * chosen[0].num_new
        order += members
    ordered = [spans[i] for i in order]
    positions = np.concatenate([np.arange(s.first, s.num_keys) for s in ordered])
    starts = np.repeat([s.extent.start for s in ordered], [s.num_new for s in ordered])
    batch = PackedBatch(
        groups=tuple(groups),
        positions_Q=torch.from_numpy(positions).to(device),
        store_rows_Q=torch.from_numpy(positions + starts).to(device),
    )
    return order, batch


def _split_bucket(members: list[int], spans: Sequence[Span], *, gather: bool) -> list[tuple[list[int], bool]]:
    """Runs of extents side by side; to gather short ones makes them one group. Members are in order of address."""
    runs: list[list[int]] = []
    for i in members:
        extent = spans[i].extent
        if runs and spans[runs[-1][-1]].extent.start + extent.size == extent.start:
            runs[-1].append(i)
        else:
            runs.append([i])
    if not gather:
        return [(run, True) for run in runs]
    long = [run for run in runs if len(run) >= MIN_RUN or len(runs) == 1]
    rest = [i for run in runs if run not in long for i in run]
    return [(run, True) for run in long] + ([(rest, len(rest) == 1)] if rest else [])


def _group(spans: list[Span], first_row: int, side_by_side: bool, device: torch.device) -> AttentionGroup:
    size, start = spans[0].extent.size, spans[0].extent.start
    num_keys = tuple(span.num_keys for span in spans)
    key_rows: slice | torch.Tensor = slice(start, start + len(spans) * size)
    if not side_by_side:
        starts = np.array([span.extent.start for span in spans])
        key_rows = torch.from_numpy((starts[:, None] + np.arange(max(num_keys))).reshape(-1)).to(device)
    return AttentionGroup(
        first_row=first_row,
        num_seqs=len(spans),
        num_new=spans[0].num_new,
        num_keys=num_keys,
        key_rows=key_rows,
        stride=size,
    )
