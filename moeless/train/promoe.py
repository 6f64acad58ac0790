"""The ProMoE baseline (arXiv 2410.22134): multi-layer perceptrons trained from scratch, for comparison.

Its trainer has one net a (source, target) pair or, as here, one a source with an output for each target in its window,
which costs a window's length less to train. Net: H -> 1024 -> 1024 -> E with ReLU and dropout .5; Adam at 1e-3; L1 to
the distribution of the experts used. The published batch is 8,192 rows, for millions of them; a batch of 512 takes as
many steps from the rows there are here. `cross_entropy` trains the same net with that loss instead.

Legend: T tokens, N rows of a part of the split, K experts a token, H hidden, E experts, B rows of a batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from moeless import metrics
from moeless.train.inputs import SourceRows
from moeless.train.pairs import PAGE_BYTES, Captured

WIDTH = 1_024
_DROPOUT = 0.5
_LEARNING_RATE = 1e-3
_BATCH_ROWS = 512


class ProMoeNet(nn.Module):
    """One source layer's net: a trunk, and a head for each target layer."""

    def __init__(self, hidden: int, experts_of: dict[int, int]) -> None:
        """`experts_of`: number of experts by target layer."""
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(hidden, WIDTH),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
        )
        self.heads = nn.ModuleDict({str(target): nn.Linear(WIDTH, num) for target, num in experts_of.items()})

    def forward(self, x_BH: torch.Tensor) -> dict[int, torch.Tensor]:
        """Outputs [B, E] by target layer."""
        features = self.trunk(x_BH)
        return {int(target): head(features) for target, head in self.heads.items()}

    def predict(self, x_TH: torch.Tensor, target: int, top_k: int) -> torch.Tensor:
        """Expert ids [T, K] of one target layer."""
        ids: torch.Tensor = self.heads[str(target)](self.trunk(x_TH.float())).topk(top_k, dim=-1).indices
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedProMoe:
    """The net of one source layer after its best epoch by mean token recall on the selection part."""

    net: ProMoeNet
    seconds: float
    num_epochs: int


def train_promoe(
    captured: Captured, source: int, targets: list[int], *, cross_entropy: bool, epochs: int, seed: int
) -> TrainedProMoe:
    """Train one net on the rows that all predictors train on."""
    began_s = time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    inputs = SourceRows(captured.store, "gate_input", source, budget_bytes=PAGE_BYTES, device=captured.device)
    ids = {target: captured.ids(target).to(captured.device) for target in targets}
    experts_of = {target: captured.points[target].layer.num_experts for target in targets}
    _, first_page = next(inputs.pages())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ProMoeNet(first_page.shape[1], experts_of).to(captured.device)
        optimizer = torch.optim.Adam(net.parameters(), lr=_LEARNING_RATE)
        best_recall, best_state, best_epoch = -1.0, net.state_dict(), 0
        for epoch in range(epochs):
            net.train()
            for first, x_TH in inputs.pages():
                rows = captured.split.train[first : first + len(x_TH)].nonzero().squeeze(1)
                for batch in rows[torch.randperm(len(rows), generator=generator)].split(_BATCH_ROWS):
                    truth = {t: ids_TK[first + batch] for t, ids_TK in ids.items()}
                    _step(net, optimizer, x_TH[batch].float(), truth, cross_entropy)
            recall = float(np.mean([_recall(captured, net, inputs, ids[t], t) for t in targets]))
            if recall > best_recall:
                best_recall, best_epoch = recall, epoch
                best_state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            elif epoch - best_epoch >= 3:
                break
    net.load_state_dict(best_state)
    return TrainedProMoe(net=net.eval(), seconds=time.monotonic() - began_s, num_epochs=best_epoch + 1)


def predict_promoe(net: ProMoeNet, inputs: SourceRows, rows_N: torch.Tensor, target: int, top_k: int) -> np.ndarray:
    """Predicted ids [N, K] for the captured rows of ascending numbers `rows_N`."""
    net.eval()
    parts = []
    with torch.no_grad():
        for first, x_TH in inputs.pages():
            low, high = torch.searchsorted(rows_N, torch.tensor([first, first + len(x_TH)])).tolist()
            if high > low:
                parts.append(net.predict(x_TH[(rows_N[low:high] - first).to(x_TH.device)], target, top_k).cpu())
    return torch.cat(parts).numpy()


def _step(
    net: ProMoeNet,
    optimizer: torch.optim.Optimizer,
    x_BH: torch.Tensor,
    truth: dict[int, torch.Tensor],
    cross_entropy: bool,
) -> None:
    losses = []
    for target, output_BE in net(x_BH).items():
        ids_BK = truth[target]
        shares_BE = torch.zeros_like(output_BE).scatter_(1, ids_BK, 1 / ids_BK.shape[1])
        if cross_entropy:
            losses.append(-(shares_BE * F.log_softmax(output_BE, dim=-1)).sum(-1).mean())
        else:
            losses.append(F.l1_loss(output_BE, shares_BE))
    optimizer.zero_grad(set_to_none=True)
    torch.stack(losses).sum().backward()
    optimizer.step()


def _recall(captured: Captured, net: ProMoeNet, inputs: SourceRows, ids_TK: torch.Tensor, target: int) -> float:
    rows_N = captured.select.rows_N
    predicted_NK = predict_promoe(net, inputs, rows_N, target, ids_TK.shape[1])
    return metrics.token_recall(predicted_NK, ids_TK.cpu()[rows_N].numpy())
