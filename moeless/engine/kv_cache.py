"""Keys and values of all sequences of a rank, under a budget in tokens.

Each sequence has one contiguous *extent* of a pool, a power of two long, that is doubled when it is full; extents are
handed out by a buddy allocator, lowest address first, so that sequences of one size stand side by side and a decode
step reads all their keys as one strided view, without a copy. The pool of a layer is made when the layer first runs
(its head sizes are then known, latent ones included) and never grows: memory is budget x bytes a token.

Legend: Q packed new tokens, P pool rows (one a token), C key-value heads, D head size of keys, V head size of values.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import torch

from moeless.errors import CapacityError
from moeless.models.attention import AttentionGroup, PackedBatch

MIN_EXTENT = 16
"""Tokens of the smallest extent."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Rows start .. start + size of the pool; start is a multiple of size."""

    size: int
    start: int


class ExtentAllocator:
    """A buddy allocator over `num_rows` rows: power-of-two extents, at their own multiples, lowest first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows - num_rows % MIN_EXTENT
        self.num_used = 0
        self._free: dict[int, list[int]] = {}
        start = 0
        while start < self.num_rows:
            size = 1 << (self.num_rows - start).bit_length() - 1
            self._free[size] = [start]
            start += size
        self.max_extent = max(self._free, default=0)

    def allocate(self, num_tokens: int) -> Extent | None:
        """An extent of at least `num_tokens`, or None when there is no room for it."""
        wanted = extent_size(num_tokens)
        size = wanted
        while not self._free.get(size):
            size *= 2
            if size > self.max_extent:
                return None
        start = heapq.heappop(self._free[size])
        while size > wanted:
            size //= 2
            heapq.heappush(self._free.setdefault(size, []), start + size)
        self.num_used += wanted
        return Extent(wanted, start)

    def extend(self, extent: Extent) -> Extent | None:
        """The extent doubled in place, or None when what lies behind it is in use."""
        behind = self._free.get(extent.size, [])
        if extent.start % (2 * extent.size) or extent.start + extent.size not in behind:
            return None
        self._remove(behind, extent.start + extent.size)
        self.num_used += extent.size
        return Extent(2 * extent.size, extent.start)

    def free(self, extent: Extent) -> None:
        """Give an extent back; neighbours that are free join."""
        self.num_used -= extent.size
        size, start = extent.size, extent.start
        while (start ^ size) in (free := self._free.setdefault(size, [])):
            self._remove(free, start ^ size)
            size, start = 2 * size, min(start, start ^ size)
        heapq.heappush(free, start)

    @staticmethod
    def _remove(heap: list[int], start: int) -> None:
        heap.remove(start)
        heapq.heapify(heap)


def extent_size(num_tokens: int) -> int:
    """Tokens of the extent that holds `num_tokens`."""
    return max(MIN_EXTENT, 1 << (num_tokens - 1).bit_length())


class KvCache:
    """The key-value store of one rank; also the `cache` object that transformers' attention modules write to."""

    is_compileable = False

    def __init__(self, num_tokens: int, latent_layers: frozenset[int] = frozenset()) -> None:
        """A store of `num_tokens`; `latent_layers` cache compressed keys and values and need them back packed.

        Raises:
            CapacityError: less than one extent.
        """
        if num_tokens < MIN_EXTENT:
            raise CapacityError(f"a key-value cache needs at least {MIN_EXTENT} tokens, got {num_tokens}")
        self.allocator = ExtentAllocator(num_tokens)
        self.peak_tokens = 0
        self._latent_layers = latent_layers
        self._extents: dict[int, Extent] = {}
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batch: PackedBatch | None = None

    @property
    def batch(self) -> PackedBatch:
        """The step that is running."""
        assert self._batch is not None, "no step is running"
        return self._batch

    @property
    def num_bytes(self) -> int:
        """Memory of the pools made so far."""
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)

    def start_step(self, batch: PackedBatch) -> None:
        """Make `batch` what the attention layers work on."""
        self._batch = batch

    def extent(self, sequence_id: int) -> Extent:
        """Where a sequence's keys and values are."""
        return self._extents[sequence_id]

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` of a sequence in all; False, with nothing changed, when there is none."""
        extent = self._extents.get(sequence_id)
        if extent is not None and num_tokens <= extent.size:
            return True
        grown = None
        if extent is not None and num_tokens <= 2 * extent.size:
            grown = self.allocator.extend(extent)
        if grown is None:
            grown = self.allocator.allocate(num_tokens)
            if grown is None:
                return False
        self.peak_tokens = max(self.peak_tokens, self.allocator.num_used)
        self._move(extent, grown)
        self._extents[sequence_id] = grown
        return True

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; nothing happens when it holds nothing."""
        extent = self._extents.pop(sequence_id, None)
        if extent is not None:
            self.allocator.free(extent)

    @torch.inference_mode()
    def _move(self, old: Extent | None, new: Extent) -> None:
        """Carry a sequence's rows over and clear the rest, so that nothing of another sequence is ever read."""
        kept = 0 if old is None else old.size
        for pools in self._pools.values():
            for pool in pools:
                if old is not None and old.start != new.start:
                    pool[:, new.start : new.start + kept] = pool[:, old.start : old.start + kept]
                pool[:, new.start + kept : new.start + new.size] = 0
        if old is not None and old.start != new.start:
            self.allocator.free(old)

    def read(self, layer: int, group: AttentionGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, C, S, D] and values [B, C, S, V] of a group: a view where its extents stand side by side."""
        keys, values = self._pools[layer]
        return _rows_of(keys, group), _rows_of(values, group)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' `key` and `value` [1, C, Q, ·]; called by transformers' attention modules.

        Returns what is to be attended to: the arguments again, as `packed_attention` reads the store itself, or for
        latent layers the packed keys of all groups, which the module expands.
        """
        if layer_idx not in self._pools:
            num_rows = self.allocator.num_rows
            self._pools[layer_idx] = tuple(  # type: ignore[assignment]
                new.new_zeros(new.shape[1], num_rows, new.shape[3]) for new in (key, value)
            )
        for pool, new in zip(self._pools[layer_idx], (key, value), strict=True):
            pool.index_copy_(1, self.batch.store_rows_Q, new[0])
        if layer_idx not in self._latent_layers:
            return key, value
        read = [self.read(layer_idx, group) for group in self.batch.groups]
        keys, values = (
            torch.cat([side.transpose(0, 1).flatten(1, 2) for side in sides], dim=1)
            for sides in zip(*read, strict=True)
        )
        return keys[None], values[None]

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """[Q] what to add to 0, 1, 2 ... to get the new tokens' positions.

        Llama-4 takes positions for its attention temperature from here; all else gets them as an argument.
        """
        positions_Q = self.batch.positions_Q
        return positions_Q - torch.arange(len(positions_Q), device=positions_Q.device)


def _rows_of(pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    num_seqs, num_keys, (heads, num_rows, size) = group.num_seqs, group.max_keys, pool.shape
    if isinstance(group.key_rows, slice):  # one call instead of four: this runs in every layer
        strides = (group.stride * size, num_rows * size, size, 1)
        return pool.as_strided((num_seqs, heads, num_keys, size), strides, group.key_rows.start * size)
    return pool.index_select(1, group.key_rows).view(heads, num_seqs, num_keys, size).transpose(0, 1)
