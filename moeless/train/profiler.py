"""`Profiler`: running scores of predictors, and of the loads themselves.

Legend: T tokens, K experts a token, E experts, H hidden, N iterations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from moeless import metrics
from moeless.models.predictor import Predictor
from moeless.models.probe import ProbedLayer
from moeless.train.rows import CapturedRows
from moeless.train.scores import PearsonSum, PredictionScore

HISTORY_ITERATIONS = 32
"""Window of the `history` predictor, in iterations of the same phase."""


class Profiler:
    """Scores over all rows seen of `gate` (the target's router on an earlier layer's router input), `gate-normed`
    (on that layer's residual through the target's own norm), `history` (loads of the iterations before) and, where
    there are predictors, `tuned`; one that reads the target's own input before attention has distance 0.
    """

    def __init__(self, points: list[ProbedLayer], distances: tuple[int, ...], tuned: Sequence[Predictor] = ()) -> None:
        self.points = points
        self.distances = distances
        self.tuned = tuned
        self.num_experts = [p.layer.num_experts for p in points]
        self.num_tokens = [0, 0]
        self.scores: dict[tuple[str, int, int, int], PredictionScore] = defaultdict(PredictionScore)
        """Keyed by (predictor, phase, source layer, target layer); `history` has its target layer as source."""
        self.pearson: dict[tuple[str, int, int], PearsonSum] = defaultdict(PearsonSum)
        """Keyed by (predictor, phase, distance); `history` has distance 0."""
        self._cosine_sums: dict[tuple[int, int, int], float] = defaultdict(float)
        self._loads: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        """Loads [N, E] of each batch of rows, keyed by (phase, layer)."""

    def add(self, rows: CapturedRows) -> None:
        """Score rows of whole iterations."""
        for phase, part in rows.by_phase():
            self.num_tokens[phase] += part.num_rows
            _, iteration_T = np.unique(part.iterations.numpy(), return_inverse=True)
            for target, ids in enumerate(part.channels["ids"]):
                actual_TK = ids.numpy()
                loads_NE = self._count(actual_TK, iteration_T, target)
                self._add_history(phase, target, actual_TK, iteration_T, loads_NE)
                for source in (target - d for d in self.distances if d <= target):
                    self._add_pair(phase, source, target, part, iteration_T, loads_NE)
                for predictor in (p for p in self.tuned if p.target_layer == target):
                    self._add_tuned(phase, predictor, part, iteration_T, loads_NE)

    def cosine(self, phase: int, source: int, target: int) -> float:
        """Mean cosine similarity of the two layers' router inputs (paper Fig. 6a)."""
        return self._cosine_sums[phase, source, target] / self.num_tokens[phase]

    def loads(self, phase: int, layer: int) -> np.ndarray:
        """Loads [N, E] of all iterations of a phase."""
        return np.concatenate(self._loads[phase, layer])

    def _count(self, ids_TK: np.ndarray, iteration_T: np.ndarray, layer: int) -> np.ndarray:
        """Tokens per iteration and expert [N, E]."""
        num_experts, num_iterations = self.num_experts[layer], int(iteration_T[-1]) + 1
        cells = iteration_T[:, None] * num_experts + ids_TK
        counts = np.bincount(cells.reshape(-1), minlength=num_iterations * num_experts)
        return counts.reshape(num_iterations, num_experts)

    def _add_history(
        self, phase: int, layer: int, actual_TK: np.ndarray, iteration_T: np.ndarray, loads_NE: np.ndarray
    ) -> None:
        """Score what the iterations before each one would have told, then remember this batch's loads."""
        before = self._loads[phase, layer]
        num_before = sum(len(part) for part in before)
        every_NE = np.concatenate([*before, loads_NE])
        cumulative = np.concatenate([np.zeros((1, every_NE.shape[1]), every_NE.dtype), every_NE.cumsum(0)])
        ends = np.arange(num_before, len(every_NE))
        seen_NE = cumulative[ends] - cumulative[np.maximum(0, ends - HISTORY_ITERATIONS)]
        known = ends > 0
        before.append(loads_NE)
        if known.any():
            top_NK = np.argsort(-seen_NE, axis=1, kind="stable")[:, : actual_TK.shape[1]]
            tokens = known[iteration_T]
            score = self.scores["history", phase, layer, layer]
            score.add_tokens(top_NK[iteration_T][tokens], actual_TK[tokens])
            score.add_loads(seen_NE[known], loads_NE[known])
            self.pearson["history", phase, 0].add(seen_NE[known], loads_NE[known])

    def _add_pair(
        self,
        phase: int,
        source: int,
        target: int,
        rows: CapturedRows,
        iteration_T: np.ndarray,
        loads_NE: np.ndarray,
    ) -> None:
        gate_inputs, point = rows.channels["gate_input"], self.points[target]
        x_TH, y_TH = gate_inputs[source], gate_inputs[target]
        cosine_T = torch.cosine_similarity(x_TH.float(), y_TH.float(), dim=-1)
        self._cosine_sums[phase, source, target] += float(cosine_T.sum())
        inputs = {"gate": x_TH}
        if point.norm is not None:
            inputs["gate-normed"] = point.norm(_near(rows.channels["residual"][source], point.norm))
        for name, input_TH in inputs.items():
            predicted_TK = point.route(_near(input_TH, point.layer.router)).cpu().numpy()
            self._add_score((name, phase, source, target), predicted_TK, rows, iteration_T, loads_NE)

    def _add_tuned(
        self, phase: int, predictor: Predictor, rows: CapturedRows, iteration_T: np.ndarray, loads_NE: np.ndarray
    ) -> None:
        channel = "gate_input" if predictor.source == "gate-input" else "layer_input"
        x_TH = rows.channels[channel][predictor.source_layer]
        predicted_TK = predictor.predict(x_TH.to(predictor.gate.weight_EH.device)).cpu().numpy()
        key = ("tuned", phase, predictor.source_layer, predictor.target_layer)
        self._add_score(key, predicted_TK, rows, iteration_T, loads_NE)

    def _add_score(
        self,
        key: tuple[str, int, int, int],
        predicted_TK: np.ndarray,
        rows: CapturedRows,
        iteration_T: np.ndarray,
        loads_NE: np.ndarray,
    ) -> None:
        name, phase, source, target = key
        score = self.scores[key]
        score.add_tokens(predicted_TK, rows.channels["ids"][target].numpy())
        predicted_NE = self._count(predicted_TK, iteration_T, target)
        score.add_loads(predicted_NE, loads_NE)
        self.pearson[name, phase, target - source].add(predicted_NE, loads_NE)

    def balance(self, phase: int, layer: int) -> tuple[float, float]:
        """(CV, max over mean) of a layer's expert loads, mean over iterations."""
        loads_NE = self.loads(phase, layer)
        cv_N, skew_N = metrics.coefficient_of_variation(loads_NE), metrics.max_over_mean(loads_NE)
        return float(np.mean(cv_N)), float(np.mean(skew_N))


def _near(x_TH: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Rows where a module's weights are; offloaded modules move their input themselves."""
    weight = next(module.parameters())
    return x_TH if weight.is_meta else x_TH.to(weight.device)
