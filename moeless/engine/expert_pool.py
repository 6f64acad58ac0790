"""One rank's slots for expert weights, and the loader that fills them in the background.

The pool decides nothing: `Residency` says what is loaded and dropped, the same on every rank. A replica is *loading*
from `request` until its weights are in a slot, then *warm*; one that has to be waited for is a *cold start*
(`load_now`). A load that fails gives its slot back and shows as a failed state, which the next exchange carries to all.

Addresses are taken once: one tensor a parameter with a row a slot, so experts in neighbouring slots can be computed by
one grouped product. The memory behind a free slot can be given back; see `SlotMemory`. On CUDA loads go through a
pinned buffer and a stream of their own; see `SlotCopier`.

Legend: R rows, H hidden, E experts, S slots.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.engine.expert_loader import ExpertLoader, Key
from moeless.engine.residency import FAILED, NOT_READY, READY
from moeless.engine.slot_copier import SlotCopier
from moeless.engine.slot_memory import SlotMemory
from moeless.errors import CapacityError, CheckpointError
from moeless.models.expert_store import ExpertSource, Weights, expert_bytes

_LONGEST_LOAD_S = 600.0


@dataclass
class PoolStats:
    """Counts since the start; bytes and seconds are of this rank."""

    loads: int = 0
    cold_loads: int = 0
    failures: int = 0
    wasted: int = 0
    """Loaded, and dropped before any token came."""
    loader_restarts: int = 0
    bytes_moved: int = 0
    load_s: float = 0.0
    rows_computed: int = 0
    last_error: str = ""


class ExpertPool:
    """See the module's head. Methods are called from one thread; only the loader runs beside it."""

    def __init__(
        self,
        source: ExpertSource,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        grouped: bool | None = None,
        max_rows: int = 16_384,
        most_slots: int = 0,
    ) -> None:
        """Take the memory of `num_slots` experts.

        Args:
            most_slots: how many there may be one day, if there is a way to `grow`.
            grouped: compute neighbouring slots with one grouped product where rows are a multiple of 16 bytes, which
                it needs; by default on CUDA only.
            max_rows: rows of one expert computed at once, which bounds the memory of activations.
        """
        self.device, self.dtype, self.hidden = torch.device(device), source.dtype, source.hidden
        self.num_slots, self.num_experts, self.expert_bytes = 0, source.num_experts, expert_bytes(source)
        self.stats = PoolStats()
        self._source, self._max_rows = source, max_rows
        aligned = all(shape[-1] * self.dtype.itemsize % 16 == 0 for shape in source.shapes.values())
        self._grouped = aligned and (self.device.type == "cuda" if grouped is None else grouped)
        with torch.inference_mode(False):  # the loader's thread writes to them outside of it
            self._memory = SlotMemory(source.shapes, num_slots, self.dtype, self.device, max(num_slots, most_slots))
        self._parameters = self._memory.parameters
        self._slots: list[Weights] = []
        self._copier = SlotCopier(source, self.device)
        self._loader = ExpertLoader(self._load)
        self._free: list[int] = []  # a heap: low slots first keeps neighbours together
        self._filling: dict[Key, int] = {}
        self._warm: dict[Key, int] = {}
        self._wanted: set[Key] = set()
        self._unused: set[Key] = set()
        self._states_LE = np.zeros((len(source.ffns), source.num_experts), np.int32)
        self.grow(num_slots)

    @staticmethod
    def slots_within(source: ExpertSource, budget_bytes: int, device: torch.device | str) -> int:
        """Slots that fit in `budget_bytes`, the loader's staging buffer included. Raises `CapacityError` for none."""
        size = expert_bytes(source)
        staging = size if torch.device(device).type == "cuda" else 0
        num_slots = (budget_bytes - staging) // size
        if num_slots < 1:
            raise CapacityError(f"{budget_bytes:,} bytes cannot hold one expert of {size:,} bytes; give more")
        return num_slots

    def grow(self, num_slots: int) -> bool:
        """Have at least so many slots; experts stay where they are. False: another pool has to be made for that."""
        if num_slots > self._memory.num_slots:
            return False
        with self._loader.changed, torch.inference_mode(False):
            for slot in range(self.num_slots, num_slots):
                self._slots.append({name: whole[slot] for name, whole in self._parameters.items()})
                heapq.heappush(self._free, slot)
            self.num_slots = max(self.num_slots, num_slots)
        return True

    @property
    def resident_bytes(self) -> int:
        """Bytes of slots in use."""
        return (self.num_slots - len(self._free)) * self.expert_bytes

    def states(self, layer: int) -> NDArray[np.int32]:
        """The state of each expert of `layer` [E] as it is exchanged: not ready, ready or failed."""
        self._revive()
        return self._states_LE[layer]

    def request(self, layer: int, expert: int) -> None:
        """Load in the background, unless it is loaded or asked for already."""
        key = (layer, expert)
        if key not in self._wanted:
            self._wanted.add(key)
            self._states_LE[key] = NOT_READY
            if key not in self._filling:  # else: dropped a moment ago, and the loader is still at it
                self._loader.submit(key)

    def load_now(self, layer: int, expert: int) -> None:
        """Cold start: return when the expert is warm, by loading it here unless the loader is at it.

        Raises:
            CheckpointError: it cannot be read.
        """
        key = (layer, expert)
        self._wanted.add(key)
        self._loader.cancel(key)
        changed, deadline = self._loader.changed, time.monotonic() + _LONGEST_LOAD_S
        with changed:
            while key in self._filling or (key not in self._warm and not self._free):
                if time.monotonic() > deadline:
                    raise CheckpointError(f"expert {expert} of MoE layer {layer} took over {_LONGEST_LOAD_S:g} s")
                changed.wait(timeout=0.1)
                self._revive()
            if key in self._warm:
                return
        self.stats.cold_loads += 1
        self._load(key)
        if key not in self._warm:
            self._load(key)  # once more: a read error may pass
        if key not in self._warm:
            raise CheckpointError(self.stats.last_error)

    def drop(self, layer: int, expert: int, *, give_back: bool = False) -> None:
        """Free the slot, or forget a failure. A load under way frees its slot when it ends.

        Args:
            give_back: the slot's memory to the operating system; not where another expert is about to take the slot.
        """
        key = (layer, expert)
        self._loader.cancel(key)
        with self._loader.changed:
            self._wanted.discard(key)
            self._states_LE[key] = NOT_READY
            slot = self._warm.pop(key, None)
        if slot is None:
            return
        self._copier.retire(slot)
        if give_back:  # while the slot is neither warm nor free, so that no load can take it
            self._memory.give_back(slot)
        with self._loader.changed:
            heapq.heappush(self._free, slot)
            self._loader.changed.notify_all()
        if key in self._unused:
            self._unused.discard(key)
            self.stats.wasted += 1

    def compute(self, layer: int, rows_RH: torch.Tensor, counts_E: Sequence[int]) -> torch.Tensor:
        """Each expert's output for its rows, which come in order of expert; all experts with rows are warm."""
        active = [(expert, count) for expert, count in enumerate(counts_E) if count]
        self.stats.rows_computed += len(rows_RH)
        slots = [self._warm[layer, expert] for expert, _ in active]
        if self._unused:
            self._unused.difference_update((layer, expert) for expert, _ in active)
        ffn = self._source.ffns[layer]
        if self._grouped and ffn.can_group and len(slots) > 1 and slots == list(range(slots[0], slots[0] + len(slots))):
            weights = {name: whole[slots[0] : slots[0] + len(slots)] for name, whole in self._parameters.items()}
            return ffn.grouped(rows_RH, weights, [count for _, count in active])
        y_RH = torch.empty_like(rows_RH)
        start = 0
        for slot, (_, count) in zip(slots, active, strict=True):
            for low in range(start, start + count, self._max_rows):
                high = min(low + self._max_rows, start + count)
                y_RH[low:high] = ffn(rows_RH[low:high], self._slots[slot])
            start += count
        return y_RH

    def weights(self, layer: int, expert: int) -> dict[str, torch.Tensor] | None:
        """The slot of a warm expert, None otherwise; for checks."""
        slot = self._warm.get((layer, expert))
        return None if slot is None else self._slots[slot]

    def loaded(self) -> list[Key]:
        """The experts that are loaded or asked for, in order."""
        return sorted(self._wanted)

    def wait_idle(self, timeout_s: float = _LONGEST_LOAD_S) -> None:
        """Return when the loader has nothing left to do. Raises `CheckpointError` if that takes `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._loader.changed:
            while not self._loader.is_idle:
                if time.monotonic() > deadline:
                    raise CheckpointError(f"experts were not loaded within {timeout_s:g} s")
                self._loader.changed.wait(timeout=0.1)
                self._revive()

    def close(self) -> None:
        """Stop the loader after the load it is at; safe to call twice."""
        self._loader.close()

    def _load(self, key: Key) -> None:
        """Fill a slot; in the loader's thread, or in the computing one for a cold start."""
        with self._loader.changed:
            if key not in self._wanted or key in self._warm:
                return
            slot = self._filling[key] = heapq.heappop(self._free)
        begin = time.perf_counter()
        try:
            self._copier.fill(*key, slot, self._slots[slot])
        except Exception as error:  # whatever went wrong, the slot is given back and the failure shows
            self._end_load(key, str(error) or repr(error))
        else:
            self.stats.load_s += time.perf_counter() - begin
            self._end_load(key, "")

    def _end_load(self, key: Key, error: str) -> None:
        with self._loader.changed:
            slot = self._filling.pop(key)
            if error:
                self.stats.failures += 1
                self.stats.last_error = error
                self._states_LE[key] = FAILED if key in self._wanted else NOT_READY
            else:
                self.stats.loads += 1
                self.stats.bytes_moved += self.expert_bytes
            if error or key not in self._wanted:
                self._memory.give_back(slot)  # nobody knows when it is filled again
                heapq.heappush(self._free, slot)
                self.stats.wasted += not error
            else:
                self._warm[key] = slot
                self._unused.add(key)
                self._states_LE[key] = READY
            self._loader.changed.notify_all()

    def _revive(self) -> None:
        """If the loader died: the load it was at has failed, the others go on in a new thread."""
        died, key = self._loader.revive()
        if died:
            self.stats.loader_restarts += 1
            if key in self._filling:
                self._end_load(key, f"the loader thread died at expert {key[1]} of MoE layer {key[0]}")
