"""The memory of a pool's slots: one tensor a parameter with a row a slot, of which free rows can be given back.

On CPU under Linux the tensors lie in private anonymous mappings of this process. Pages that nothing was written to take
no memory, and `MADV_DONTNEED` makes pages of a free slot such ones again: the tensor keeps its address, and the next
expert in the slot gets new pages as it is written. Only whole pages inside a slot's own rows are given back, so what
two slots share stays, less than two pages a parameter. And as rows that are not used cost nothing, there may be more of
them than are needed now, so that a pool can grow without its experts being moved or read again.

On CUDA, and on other systems, slots keep their memory for the life of the pool, and there are none to spare.
"""

from __future__ import annotations

import math
import mmap
import sys

import torch

from moeless.models.expert_store import Shapes, Weights


class SlotMemory:
    """See the module's head.

    Attributes:
        num_slots: rows there are.
        parameters: name -> tensor of `num_slots` rows, each of the parameter's shape; not initialised.
    """

    def __init__(
        self, shapes: Shapes, num_slots: int, dtype: torch.dtype, device: torch.device, most_slots: int
    ) -> None:
        """`num_slots` rows of each of `shapes`, or `most_slots` where they cost nothing."""
        self.num_slots = num_slots
        self.parameters: Weights = {}
        self._mappings: dict[str, mmap.mmap] = {}
        if device.type == "cpu" and sys.platform == "linux":
            size = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
            try:
                self._mappings = {name: _reserve(most_slots * size[name]) for name in shapes}
                self.num_slots = most_slots
            except OSError:  # a system that promises no more memory than it has
                self._mappings = {name: _reserve(num_slots * size[name]) for name in shapes}
        for name, shape in shapes.items():
            if name in self._mappings:
                values = torch.frombuffer(self._mappings[name], dtype=dtype)  # keeps the mapping alive
                self.parameters[name] = values.view(self.num_slots, *shape)
            else:
                self.parameters[name] = torch.empty(num_slots, *shape, dtype=dtype, device=device)

    def give_back(self, slot: int) -> None:
        """Give the pages of `slot` to the operating system; what was in it is lost. Nobody may use or fill it."""
        for name, mapping in self._mappings.items():
            whole = self.parameters[name]
            size = whole.stride(0) * whole.itemsize
            begin = -(-slot * size // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (slot + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _reserve(num_bytes: int) -> mmap.mmap:
    """Addresses whose memory comes when it is written to. Raises `OSError`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, num_bytes, flags=flags)
