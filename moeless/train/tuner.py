"""Training one predictor's numbers: a few stages of Adam, each continuing from the best of the last.

Stages of a layer: the plain copy of the gate with each loss, then adapters of growing rank with the loss that did
better. It ends as soon as held-out accuracy passes the threshold.

Legend: T tokens, K experts a token, H hidden, E experts, R adapter rank, B rows of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from moeless.models.gate import Gate
from moeless.models.predictor import apply_weights
from moeless.models.predictor_file import TunedWeights
from moeless.train.inputs import SourceRows, Truth, log_scores

_BATCH_ROWS = 512
_STEP_LOGITS = 0.7
"""How far one step of Adam may move a logit of the average row; from it and the size of inputs follows the rate."""
_MEAN_GELU = 0.45
"""Mean magnitude of gelu(a) for a standard normal a, which is how the adapter starts."""
_WARMUP_STEPS = 20
_AUTO_RANKS = (16, 128)
_PROMOE_HIDDEN = 1024
_PROMOE_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How predictors are trained, as the user asked for it."""

    rank: int | None
    """Adapter rank, None for growing one as needed."""
    loss: str
    epochs: int
    threshold: float
    seed: int

    @property
    def losses(self) -> tuple[str, ...]:
        """What to try, in order."""
        return ("soft", "hard") if self.loss == "auto" else (self.loss,)

    def ranks(self, gate: Gate) -> tuple[int, ...]:
        """Adapter ranks in the order of trying them; (0,) where the router cannot carry one."""
        if self.rank is not None:
            return (self.rank,) if gate.takes_adapter else (0,)
        return (0, *auto_ranks(gate.hidden, gate.num_experts)) if gate.takes_adapter else (0,)


def auto_ranks(hidden: int, num_experts: int) -> tuple[int, ...]:
    """Ranks that keep a predictor within 2 % of a ProMoE MLP for the same layer; the smallest is always tried."""
    room = _PROMOE_SHARE * promoe_parameters(hidden, num_experts) - num_experts * hidden
    most = max(_AUTO_RANKS[0], int(room / (hidden + num_experts)))
    return tuple(rank for rank in _AUTO_RANKS if rank <= min(most, hidden))


def promoe_parameters(hidden: int, num_experts: int, width: int = _PROMOE_HIDDEN) -> int:
    """Numbers in ProMoE's MLP H -> width -> width -> E, biases included (arXiv 2410.22134, its trainer's defaults)."""
    return hidden * width + width + width * width + width + width * num_experts + num_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trained candidate."""

    weights: TunedWeights
    loss: str
    accuracy: float
    """On the selection part."""


class Tuner:
    """Trains predictors of one target layer from one source."""

    def __init__(
        self,
        gate: Gate,
        inputs: SourceRows,
        truth: Truth,
        train_T: torch.Tensor,
        *,
        recipe: Recipe,
        seed: int,
        accelerator: Accelerator,
        score: Callable[[TunedWeights], float],
    ) -> None:
        """`score` gives a candidate's accuracy on the selection part; `train_T` masks the rows to train on."""
        self.gate, self.inputs, self.truth, self.train_T = gate, inputs, truth, train_T
        self.recipe, self.accelerator, self.score = recipe, accelerator, score
        self._generator = torch.Generator().manual_seed(seed)
        self._rms, self._length = self._input_size()

    def best(self, deadline_s: float) -> Trial:
        """The best of all stages by accuracy on the selection part; `deadline_s` is on `time.monotonic`'s clock."""
        plain = TunedWeights(weight_EH=self.gate.weight_EH.float())
        best: Trial | None = None
        losses = self.recipe.losses
        for rank in self.recipe.ranks(self.gate):
            stage: list[Trial] = []
            for loss in losses:
                start = best.weights if best is not None else plain
                stage.append(self._stage(self._grown(start, rank), loss, deadline_s))
                if stage[-1].accuracy >= self.recipe.threshold:
                    break
            best = max([best, *stage] if best else stage, key=lambda t: t.accuracy)
            losses = (best.loss,)
            if best.accuracy >= self.recipe.threshold or time.monotonic() > deadline_s:
                break
        assert best is not None
        return best

    def _stage(self, start: TunedWeights, loss: str, deadline_s: float) -> Trial:
        """Train all of `start` for the recipe's epochs with a falling rate; the best epoch's numbers."""
        parameters = {name: t.clone().requires_grad_() for name, t in _named(start).items()}
        optimizer = self.accelerator.prepare(torch.optim.AdamW(self._groups(parameters), weight_decay=0.0))
        bases = [group["lr"] for group in optimizer.param_groups]
        num_steps = self.recipe.epochs * max(1, math.ceil(int(self.train_T.sum()) / _BATCH_ROWS))
        best: Trial | None = None
        step = 0
        for _ in range(self.recipe.epochs):
            for z_BH, target_BE in self._batches(loss):
                rate = min(1.0, (step + 1) / _WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
                for group, base in zip(optimizer.param_groups, bases, strict=True):
                    group["lr"] = base * rate
                self._step(parameters, optimizer, z_BH, target_BE)
                step += 1
            weights = TunedWeights(**{name: t.detach().clone() for name, t in parameters.items()})
            trial = Trial(weights=weights, loss=loss, accuracy=self.score(weights))
            best = trial if best is None or trial.accuracy > best.accuracy else best
            if best.accuracy >= self.recipe.threshold or time.monotonic() > deadline_s:
                break
        assert best is not None
        return best

    def _step(self, parameters: dict[str, torch.Tensor], optimizer: Any, z_BH: torch.Tensor, target_BE: Any) -> None:
        with self.accelerator.autocast():
            logits_BE = apply_weights(TunedWeights(**parameters), z_BH, self.gate.bias_E)
        loss = -(target_BE * log_scores(logits_BE.float(), self.gate.scoring)).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        optimizer.step()

    def _batches(self, loss: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch: (inputs of the linear map [B, H], target distribution [B, E]), shuffled within each page."""
        ids_TK, scores_TE = self.truth.ids_TK, self.truth.scores_TE
        for first, x_TH in self.inputs.pages():
            rows = self.train_T[first : first + len(x_TH)].nonzero().squeeze(1)
            order = rows[torch.randperm(len(rows), generator=self._generator)]
            for batch in order.to(x_TH.device).split(_BATCH_ROWS):
                if loss == "soft":
                    target_BE = scores_TE[first + batch]
                else:
                    ids_BK = ids_TK[first + batch]
                    target_BE = torch.zeros(len(batch), self.gate.num_experts, device=x_TH.device)
                    target_BE.scatter_(1, ids_BK, 1 / ids_BK.shape[1])
                yield self.gate.linear_input(x_TH[batch]).float(), target_BE

    def _input_size(self) -> tuple[float, float]:
        """(root mean square of a component, mean sum of magnitudes of a row) of the linear map's input."""
        _, x_TH = next(self.inputs.pages())
        z_TH = self.gate.linear_input(x_TH[:4096]).float()
        return max(float(z_TH.square().mean().sqrt()), 1e-6), max(float(z_TH.abs().sum(1).mean()), 1e-6)

    def _groups(self, parameters: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        """A step of Adam is as large as its rate whatever the gradient; what it does to a logit sets the rates."""
        rate = _STEP_LOGITS / self._length
        groups = [{"params": [p for name, p in parameters.items() if name != "up_ER"], "lr": rate}]
        if "up_ER" in parameters:
            width = _MEAN_GELU * parameters["up_ER"].shape[1]
            groups.append({"params": [parameters["up_ER"]], "lr": _STEP_LOGITS / width})
        return groups

    def _grown(self, weights: TunedWeights, rank: int) -> TunedWeights:
        """`weights` with an adapter of `rank`: new rows of A are random and new columns of B zero, the rest stays."""
        if rank <= weights.rank:
            return weights
        num_experts, hidden = weights.weight_EH.shape
        new = torch.randn(rank - weights.rank, hidden, generator=self._generator) / (hidden**0.5 * self._rms)
        new_RH = new.to(weights.weight_EH)
        new_ER = new_RH.new_zeros(num_experts, len(new_RH))
        if weights.down_RH is None or weights.up_ER is None:
            return TunedWeights(weight_EH=weights.weight_EH, down_RH=new_RH, up_ER=new_ER)
        return TunedWeights(
            weight_EH=weights.weight_EH,
            down_RH=torch.cat([weights.down_RH, new_RH]),
            up_ER=torch.cat([weights.up_ER, new_ER], dim=1),
        )


def _named(weights: TunedWeights) -> dict[str, torch.Tensor]:
    named = {"weight_EH": weights.weight_EH, "down_RH": weights.down_RH, "up_ER": weights.up_ER}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
