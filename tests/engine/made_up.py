"""Experts made up for tests, with ways to be slow or to fail."""

from __future__ import annotations

import threading

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moeless.errors import CheckpointError
from moeless.models.expert_ffn import ExpertFfn
from moeless.models.expert_store import Shapes, Weights


class MadeUpExperts:
    """An `ExpertSource` whose weights are a function of layer and expert."""

    def __init__(self, num_layers: int = 2, num_experts: int = 4, hidden: int = 8, ffn: int = 12) -> None:
        config = MixtralConfig(hidden_size=hidden, intermediate_size=ffn, num_local_experts=1)
        config._experts_implementation = "eager"
        with torch.device("meta"):
            module = MixtralExperts(config)
        self.shapes: Shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        self.ffns = [ExpertFfn(module)] * num_layers
        self.num_experts, self.hidden, self.dtype = num_experts, hidden, torch.float32
        self.gate = threading.Event()
        """Loads in other threads than the main one wait for it."""
        self.gate.set()
        self.failing: set[tuple[int, int]] = set()
        self.deadly: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int]] = []

    def weights(self, layer: int, expert: int) -> Weights:
        generator = torch.Generator().manual_seed(100 * layer + expert)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}

    def read_into(self, layer: int, expert: int, out: Weights) -> None:
        self.reads.append((layer, expert))
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(20)
        if (layer, expert) in self.deadly:
            self.deadly.discard((layer, expert))
            raise SystemExit  # ends a thread silently
        if (layer, expert) in self.failing:
            raise CheckpointError(f"cannot read expert {expert} of MoE layer {layer}: the disk is on fire")
        for name, value in self.weights(layer, expert).items():
            out[name].copy_(value)
