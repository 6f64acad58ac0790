"""How long one prediction takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

BATCHES = (1, 64, 1024)
_NUM_CALLS = 15


def microseconds(predict: Callable[[torch.Tensor], torch.Tensor], example_TH: torch.Tensor) -> dict[str, float]:
    """Median time of a call of `predict` on the first rows of `example_TH`, by batch size, in microseconds.

    Batches larger than the example are left out. Accelerators are waited for, so a launch is not taken for a call.
    """
    found = {}
    with torch.inference_mode():
        for batch in (b for b in BATCHES if b <= len(example_TH)):
            rows = example_TH[:batch].contiguous()
            for _ in range(2):
                predict(rows)
            times_s = []
            for _ in range(_NUM_CALLS):
                _wait(rows.device)
                began_s = time.perf_counter()
                predict(rows)
                _wait(rows.device)
                times_s.append(time.perf_counter() - began_s)
            found[str(batch)] = sorted(times_s)[_NUM_CALLS // 2] * 1e6
    return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
