"""How an expert's weights get into a slot: straight on CPU, through a pinned buffer and a stream of its own on CUDA.

On CUDA the copy runs beside the computation. It starts only after the last use of the slot's former weights (an event
recorded when the slot was given up), and a slot counts as ready only after the copy has ended, so the compute stream
never waits. The CUDA path has not been run where no GPU was at hand; `make gpu-check` runs it.
"""

from __future__ import annotations

import threading

import torch

from moeless.models.expert_store import ExpertSource, Weights


class SlotCopier:
    """Fills slots from a source; usable from two threads."""

    def __init__(self, source: ExpertSource, device: torch.device) -> None:
        """On CUDA takes a pinned buffer of one expert."""
        self._source, self._device = source, device
        self._lock = threading.Lock()
        self._on_cuda = device.type == "cuda"
        self._last_use: dict[int, torch.cuda.Event] = {}
        if self._on_cuda:
            self._stream = torch.cuda.Stream(device)
            self._staging = {
                name: torch.empty(shape, dtype=source.dtype, pin_memory=True) for name, shape in source.shapes.items()
            }

    def retire(self, slot: int) -> None:
        """Nothing that is launched from now on uses the weights in `slot`; called by the computing thread."""
        if self._on_cuda:
            self._last_use[slot] = torch.cuda.Event()
            self._last_use[slot].record(torch.cuda.current_stream(self._device))

    def fill(self, layer: int, expert: int, slot: int, out: Weights) -> None:
        """Put one expert's weights into `out`, the tensors of `slot`. Raises `CheckpointError`."""
        if not self._on_cuda:
            self._source.read_into(layer, expert, out)
            return
        with self._lock, torch.cuda.stream(self._stream):
            self._source.read_into(layer, expert, self._staging)
            last_use = self._last_use.pop(slot, None)
            if last_use is not None:
                self._stream.wait_event(last_use)
            for name, target in out.items():
                target.copy_(self._staging[name], non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()  # blocks this thread only
