"""What a layer costs, in time and in memory, for a given division of tokens over ranks.

Legend: E experts, G ranks. `shares_EG` holds the tokens of each expert that each rank computes.

The paper's model (section 3) is linear: alpha a token computed, beta a token received. Real experts obey a roofline: an
expert launched with any tokens at all has to read its weights first, so it takes at least `floor_us` (METRO, arXiv
2512.09277). With floor 0 this is the paper's model; with alpha = beta = 0 it counts launches, which is METRO's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.errors import UsageError
from moeless.policy.types import Floats


@dataclass(frozen=True)
class CostModel:
    """Times in microseconds and sizes in bytes; measured by the engine, or derived from data sheets by `cost_of`.

    Attributes:
        floor_us: least time of an expert launched with any tokens.
        alpha_us: time of one token in one expert.
        beta_us: all-to-all time of one token received by a rank, there and back.
        latency_us: constant time of a layer's two all-to-alls.
        expert_bytes: weights of one expert.
        copy_bytes_per_s: rate at which a rank loads weights in the background (a cold start's bandwidth).
    """

    floor_us: float = 0.0
    alpha_us: float = 1.0
    beta_us: float = 0.0
    latency_us: float = 0.0
    expert_bytes: float = 0.0
    copy_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("floor_us", "alpha_us", "beta_us", "latency_us", "expert_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} must be a finite number from 0, got {value}")
        if not self.copy_bytes_per_s > 0:
            raise UsageError(f"copy_bytes_per_s must be above 0, got {self.copy_bytes_per_s}")
        if self.floor_us == self.alpha_us == self.beta_us == 0:
            raise UsageError("a cost model needs at least one of floor_us, alpha_us and beta_us above 0")

    @property
    def copy_us(self) -> float:
        """Time to load one expert."""
        return 1e6 * self.expert_bytes / self.copy_bytes_per_s

    @property
    def floor_tokens(self) -> float:
        """Tokens that one launch computes for the price of its floor."""
        return self.floor_us / self.alpha_us if self.alpha_us else math.inf

    def expert_us(self, tokens: NDArray[np.generic]) -> Floats:
        """Time of experts given these tokens each, communication included: 0, or max(floor, alpha W) + beta W."""
        x = np.asarray(tokens, float)
        times: Floats = np.maximum(self.floor_us, self.alpha_us * x) * (x > 0) + self.beta_us * x
        return times

    def rank_us(self, shares_EG: NDArray[np.generic]) -> Floats:
        """Time of each rank [G]: the sum over its experts, which run one after the other."""
        times: Floats = self.expert_us(shares_EG).sum(0)
        return times

    def layer_us(self, shares_EG: NDArray[np.generic]) -> float:
        """Time of the layer: its slowest rank, plus the latency of the all-to-alls. 0 for a layer without tokens."""
        slowest = float(self.rank_us(shares_EG).max())
        return slowest + self.latency_us if slowest > 0 else 0.0

    def bound_us(self, counts_E: NDArray[np.generic], num_ranks: int) -> float:
        """A time that no placement and split over `num_ranks` can be below; for counts [K, E] the mean over K.

        The work of undivided experts spread perfectly, or, for few tokens, the floors of the most launches on a rank.
        """
        counts = np.atleast_2d(counts_E)
        launches = -(-np.count_nonzero(counts, axis=1) // num_ranks)
        return float(np.maximum(self.expert_us(counts).sum(1) / num_ranks, launches * self.floor_us).mean())


# The paper's T = alpha W in units of tokens: balances the number of tokens, whatever they cost.
TOKENS = CostModel()


def billed_gbs(num_replicas: int, layer_us: float, expert_bytes: float) -> float:
    """Pay-per-use cost of one layer in one iteration in GB·s: live replicas x expert GB x that layer's own seconds."""
    return num_replicas * expert_bytes * 1e-9 * layer_us * 1e-6


def resident_gbs(num_replicas: int, wall_us: float, expert_bytes: float) -> float:
    """Cost of everything in memory in GB·s: replicas of *all* layers x expert GB x wall seconds."""
    return num_replicas * expert_bytes * 1e-9 * wall_us * 1e-6


@dataclass(frozen=True)
class Cluster:
    """Ranks of one kind. Rates are of one rank in one direction."""

    num_ranks: int
    memory_bytes_per_s: float
    flop_per_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its expert layers' cost depends on."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    ffn: int
    weight_bytes: float = 2.0
    activation_bytes: float = 2.0


# Dense bf16 matrix rates sustained are about 0.6 of the data sheet's peak.
CLUSTERS = {
    # The paper's testbed (section 6.1): pairwise NVLink, PCIe 5.0 at 64 GB/s. RTX A6000 data sheet: 768 GB/s memory,
    # 154.8 Tflop/s bf16 dense, NVLink 112.5 GB/s both ways.
    "8xa6000": Cluster(8, 768e9, 0.6 * 154.8e12, 56.25e9, 64e9),
    # H200 SXM data sheet: 4.8 TB/s, 989.5 Tflop/s bf16 dense (600 sustained), NVLink 900 GB/s both ways; PCIe 5.0 x16.
    "8xh200": Cluster(8, 4.8e12, 600e12, 450e9, 64e9),
}

# From each model's published config.json; num_layers counts its MoE layers, weights in bf16 as released or dequantised.
MODELS = {
    "mixtral-8x7b": ModelShape(num_layers=32, num_experts=8, top_k=2, hidden=4096, ffn=14336),
    "phi-3.5-moe": ModelShape(num_layers=32, num_experts=16, top_k=2, hidden=4096, ffn=6400),
    "llama-4-scout": ModelShape(num_layers=48, num_experts=16, top_k=1, hidden=5120, ffn=8192),
    "gpt-oss-20b": ModelShape(num_layers=24, num_experts=32, top_k=4, hidden=2880, ffn=2880),
    "deepseek-v2-lite": ModelShape(num_layers=26, num_experts=64, top_k=6, hidden=2048, ffn=1408),
    "qwen3-30b-a3b": ModelShape(num_layers=48, num_experts=128, top_k=8, hidden=2048, ffn=768),
}


def cost_of(model: ModelShape, cluster: Cluster) -> CostModel:
    """The cost model of gated experts (three H x F matrices) from data sheets.

    floor = weight bytes / memory rate; alpha = 2 flop a parameter / flop rate; beta = a token's activations there and
    back / link rate. The all-to-all latency is left at 0: it is the same for every balancer and has to be measured.
    """
    num_parameters = 3 * model.hidden * model.ffn
    expert_bytes = num_parameters * model.weight_bytes
    return CostModel(
        floor_us=1e6 * expert_bytes / cluster.memory_bytes_per_s,
        alpha_us=1e6 * 2 * num_parameters / cluster.flop_per_s,
        beta_us=1e6 * 2 * model.hidden * model.activation_bytes / cluster.link_bytes_per_s,
        expert_bytes=expert_bytes,
        copy_bytes_per_s=cluster.copy_bytes_per_s,
    )
