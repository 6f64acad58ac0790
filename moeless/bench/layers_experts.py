"""Random experts of a chosen shape, in a file that ranks map as they map a checkpoint.

Legend: E experts, H hidden, F expert ffn.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moeless.models.expert_ffn import ExpertFfn
from moeless.models.expert_store import Shapes, Weights


def write_random_experts(path: Path, *, num_experts: int, hidden: int, ffn: int, dtype: torch.dtype, seed: int) -> None:
    """Write E gated experts (three H x F matrices each) whose outputs have about the size of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(hidden, ffn).items():
        weights = torch.empty(num_experts, *shape)
        weights.normal_(0, shape[-1] ** -0.5, generator=generator)
        tensors[name] = weights.to(dtype)
    save_file(tensors, path)


class RandomExperts:
    """An `ExpertSource` of one layer over a file of `write_random_experts`."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        slices = {name: self._file.get_slice(name) for name in ("gate_up_proj", "down_proj")}
        self._slices = slices
        self.num_experts, self.hidden, ffn = slices["down_proj"].get_shape()
        self.shapes: Shapes = _shapes(self.hidden, ffn)
        self.dtype: torch.dtype = slices["down_proj"][0:1].dtype
        config = MixtralConfig(hidden_size=self.hidden, intermediate_size=ffn, num_local_experts=1)
        with torch.device("meta"):
            self.ffns = [ExpertFfn(MixtralExperts(config))]

    def read_into(self, layer: int, expert: int, out: Weights) -> None:
        """See `ExpertSource`."""
        for name, target in out.items():
            target.copy_(self._slices[name][expert : expert + 1][0])


def _shapes(hidden: int, ffn: int) -> Shapes:
    return {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
