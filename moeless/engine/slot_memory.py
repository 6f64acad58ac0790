"""The memory of a pool's slots: one tensor a parameter with a row a slot, of which free rows can be given back.

On CPU under Linux the tensors lie in private anonymous mappings of this process. Pages that nothing was written to take
no memory, and `MADV_DONTNEED` makes pages of a free slot such ones again: the tensor keeps its address, and the next
expert in the slot gets new pages as it is written. Only whole pages inside a slot's own rows are given back, so what
two slots share stays, less than two pages a parameter.

On CUDA, and on other systems, slots keep their memory for the life of the pool.
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
        parameters: name -> tensor of `num_slots` rows, each of the parameter's shape; not initialised.
        gives_back: whether `give_back` does anything.
    """

    def __init__(self, shapes: Shapes, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve `num_slots` rows of each of `shapes`."""
        self.parameters: Weights = {}
        self.gives_back = device.type == "cpu" and sys.platform == "linux"
        self._mappings: dict[str, mmap.mmap] = {}
        for name, shape in shapes.items():
            if not self.gives_back:
                self.parameters[name] = torch.empty(num_slots, *shape, dtype=dtype, device=device)
                continue
            count = num_slots * math.prod(shape)
            mapping = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.parameters[name] = torch.frombuffer(mapping, dtype=dtype, count=count).view(num_slots, *shape)
            self._mappings[name] = mapping  # lives as long as a tensor over it

    def give_back(self, slot: int) -> None:
        """Give the pages of `slot` to the operating system; what was in it is lost. Nobody may use or fill it."""
        for name, mapping in self._mappings.items():
            whole = self.parameters[name]
            size = whole.stride(0) * whole.itemsize
            begin = -(-slot * size // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (slot + 1) * size // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
