"""One MoE layer on one rank: exchange, settle, dispatch, compute, combine, in this order and nothing else.

A block stands in for the experts of its layer: `install` puts it where the model calls them. It is called with a
rank's own tokens, or with none by an idle rank (`idle`), because every rank takes part in every layer.

Legend: T tokens, K experts a token, H hidden, E experts, G ranks, R received rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from moeless.engine.controller import ExpertController
from moeless.engine.dispatch import balanced_ids, combine, dispatch, plan_route
from moeless.engine.ep import RankGroup
from moeless.engine.expert_pool import ExpertPool
from moeless.engine.routed_experts import StepIds
from moeless.engine.verify import LayerVerifier
from moeless.models.family import MoeLayer

STAGES = ("exchange", "plan", "dispatch", "compute", "combine")


class StageTimer:
    """Seconds of each stage, by the clock it is given: `seconds` since the last `reset`, `laps` since the `start`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = 0.0
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.laps = dict.fromkeys(STAGES, 0.0)

    def start(self) -> float:
        """Begin the first stage; the clock's time."""
        self.laps = dict.fromkeys(STAGES, 0.0)
        self._last = self._clock()
        return self._last

    def lap(self, stage: str) -> float:
        """End a stage and begin the next; the clock's time."""
        now = self._clock()
        self.seconds[stage] += now - self._last
        self.laps[stage] += now - self._last
        self._last = now
        return now

    def reset(self) -> None:
        """Forget all laps."""
        self.seconds = dict.fromkeys(STAGES, 0.0)


class MoeBlock:
    """See the module's head. All state is in the pool and the controller, which the blocks of a model share."""

    def __init__(
        self,
        layer: int,
        pool: ExpertPool,
        controller: ExpertController,
        group: RankGroup,
        timer: StageTimer | None = None,
        verifier: LayerVerifier | None = None,
        step_ids: StepIds | None = None,
    ) -> None:
        """A block for MoE layer number `layer` (its ordinal).

        Args:
            verifier: checks some of its executions.
            step_ids: told each execution's ids.
        """
        self.layer, self.pool, self.controller, self.group = layer, pool, controller, group
        self.timer, self.verifier, self.step_ids = timer or StageTimer(), verifier, step_ids or StepIds()

    def __call__(self, hidden: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, in the shape of `hidden` ([T, H], or [B, S, H] with T = B*S).

        Raises:
            RankError: another rank did not take part in time.
            CheckpointError: an expert that is nowhere loaded could not be read.
        """
        controller, timer = self.controller, self.timer
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        if controller.lossy:
            first = self.group.rank * controller.num_experts // self.group.size
            ids_TK = balanced_ids(ids_TK, controller.num_experts, first)
        self.step_ids.note(ids_TK)
        begin_s = timer.start()
        table_GC = self.group.exchange(controller.announce(self.layer, x_TH, ids_TK))
        timer.lap("exchange")
        route = plan_route(ids_TK, *controller.settle(self.layer, table_GC))
        timer.lap("plan")
        receive = dispatch(x_TH, ids_TK.shape[1], route, self.group)
        timer.lap("dispatch")
        controller.plan_ahead(self.layer)  # while rows travel
        timer.lap("plan")
        rows_RH = receive()
        timer.lap("dispatch")
        y_RH = self.pool.compute(self.layer, rows_RH, route.counts_E)
        timer.lap("compute")
        out_TH = combine(y_RH, weights_TK, route, self.group)
        end_s = timer.lap("combine")
        controller.end_layer(self.layer, end_s - begin_s, timer.laps)
        if self.verifier is not None and self.verifier.is_due(controller.iteration, self.layer):
            self.verifier.check(controller.iteration, self.layer, x_TH, ids_TK, weights_TK, out_TH)
        return out_TH.view(hidden.shape)

    def idle(self) -> None:
        """Take part without tokens."""
        x_TH = torch.empty(0, self.pool.hidden, dtype=self.pool.dtype, device=self.pool.device)
        self(x_TH, torch.empty(0, 1, dtype=torch.int64, device=x_TH.device), x_TH.new_empty(0, 1))

    def install(self, model: PreTrainedModel, layer: MoeLayer) -> None:
        """Make `model` call this block instead of the experts of `layer`."""
        if layer.experts_receive_ids:
            layer.experts.forward = self
        else:
            parent = model.get_submodule(layer.experts_name.rpartition(".")[0])
            parent.forward = _Llama4Moe(parent, self)


class _Llama4Moe:
    """Llama-4's MoE module over a block: only the chosen experts run, instead of all of them on all tokens.

    The router's score multiplies an expert's *input*, so each (token, expert) pair has a row of its own and the weight
    of the sum is 1.
    """

    def __init__(self, module: Any, block: MoeBlock) -> None:
        self._module, self._block = module, block

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._module
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        scores_TE, logits_TE = module.router(x_TH)
        ids_TK = logits_TE.topk(module.top_k, dim=-1).indices
        rows_TKH = x_TH.unsqueeze(1) * scores_TE.gather(1, ids_TK).unsqueeze(-1)
        pairs_NH = rows_TKH.view(-1, x_TH.shape[-1])
        y_NH = self._block(pairs_NH, ids_TK.view(-1, 1), torch.ones_like(pairs_NH[:, :1]))
        return module.shared_expert(x_TH) + y_NH.view(rows_TKH.shape).sum(1), logits_TE
