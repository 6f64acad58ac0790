"""Which experts and ranks the tokens of a process went to: running sums, the last step, and on demand a trace.

Sums are kept for the life of the process, so whoever reads them twice can take differences. All ranks see the same
counts; times are a rank's own.

Legend: L MoE layers, E experts, G ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.engine.durations import LAYER_BUCKETS_S, Durations
from moeless.errors import DataError
from moeless.metrics import load_accuracy
from moeless.trace.files import save_trace
from moeless.trace.recorder import Recorder
from moeless.trace.routes import Phase

Ints = NDArray[np.integer]

PARTS = ("dispatch", "combine", "plan", "predictor", "cold_start")
"""Times that are not told apart by layer."""


class Traffic:
    """See the module's head.

    Attributes:
        layer: times of each layer on this rank, from the exchange to the combined result.
        straggler: for each layer, the slowest rank's time in its experts minus the mean of all ranks.
        dispatch, combine, plan: times of these stages in a layer on this rank.
        predictor: times of single predictions on this rank.
        cold_start: times that this rank loaded an expert while its layer waited.
    """

    def __init__(self, num_layers: int, num_experts: int, num_ranks: int, rank: int = 0, distance: int = 1) -> None:
        """Start with nothing seen, on rank `rank`; predictions are for `distance` layers ahead."""
        self.num_layers, self.num_experts, self.num_ranks = num_layers, num_experts, num_ranks
        self.tokens_LE = np.zeros((num_layers, num_experts), np.int64)
        """Assignments to each expert: a token counts once for each of its k experts."""
        self.rank_tokens_LG = np.zeros((num_layers, num_ranks), np.int64)
        """The same by the rank that computed them."""
        self.layer = [Durations(LAYER_BUCKETS_S) for _ in range(num_layers)]
        self.straggler = [Durations() for _ in range(num_layers)]
        self.dispatch, self.combine, self.plan = Durations(), Durations(), Durations()
        self.predictor, self.cold_start = Durations(), Durations()
        self._last_LE = np.zeros((num_layers, num_experts), np.int64)
        self._last_shares_LEG = np.zeros((num_layers, num_experts, num_ranks), np.int64)
        self._last_ready_LEG = np.zeros((num_layers, num_experts, num_ranks), bool)
        self._last_predicted: list[Ints | None] = [None] * num_layers
        self._rank, self._distance, self._top_k = rank, distance, 0
        self._sources_G = np.zeros(num_ranks, np.int64)
        self._recorder: Recorder | None = None
        self._stopped: Recorder | None = None

    def note(
        self, layer: int, counts_GE: Ints, shares_EG: Ints, ready_EG: NDArray[np.bool_], predicted_E: Ints | None
    ) -> None:
        """Take in one layer of a step: where tokens came from, who computed them, over which replicas."""
        counts_E, self._sources_G = counts_GE.sum(0), counts_GE.sum(1)
        self.tokens_LE[layer] += counts_E
        self.rank_tokens_LG[layer] += shares_EG.sum(0)
        self._last_LE[layer] = counts_E
        self._last_shares_LEG[layer] = shares_EG
        self._last_ready_LEG[layer] = ready_EG
        self._last_predicted[layer] = predicted_E
        if self._recorder is not None:
            self._recorder.record_layer(layer, counts_GE, ready_EG, predicted_E)

    def note_whole(self, counts_LE: Ints) -> None:
        """Take in all layers of a step of a model that runs whole on one rank."""
        self._sources_G = counts_LE[-1].sum(keepdims=True)
        self.tokens_LE += counts_LE
        self.rank_tokens_LG += counts_LE.sum(1, keepdims=True)
        self._last_LE[:], self._last_shares_LEG[..., 0] = counts_LE, counts_LE
        self._last_ready_LEG[:] = True
        if self._recorder is not None:
            for layer, counts_E in enumerate(counts_LE):
                self._recorder.record_layer(layer, counts_E[None], np.ones((len(counts_E), 1), bool), None)

    def note_time(self, layer: int, seconds: float, stage_s: Mapping[str, float]) -> None:
        """Take in how long a layer took on this rank, and its stages."""
        self.layer[layer].note(seconds)
        self.dispatch.note(stage_s["dispatch"])
        self.combine.note(stage_s["combine"])
        self.plan.note(stage_s["plan"])

    def end_iteration(self, *, phase: Phase, num_tokens: int, duration_s: float) -> None:
        """Close a step that had `num_tokens` tokens on this rank."""
        if num_tokens:
            self._top_k = int(self._sources_G[self._rank]) // num_tokens
        if self._recorder is not None:
            all_tokens = int(self._sources_G.sum()) // max(1, self._top_k)
            self._recorder.end_iteration(phase=phase, num_tokens=all_tokens, duration_s=duration_s)

    def start_record(self, budget_bytes: float) -> int:
        """Record from here on, in a ring that takes at most `budget_bytes`; how many steps it holds.

        Raises:
            DataError: a record is running.
        """
        if self._recorder is not None:
            raise DataError("an expert distribution record is already running; stop it first")
        cells = self.num_layers * self.num_experts
        capacity = max(1, int(budget_bytes / (cells * (5 * self.num_ranks + 4) + 32)) - 1)
        self._recorder = Recorder(
            num_layers=self.num_layers, num_experts=self.num_experts, num_ranks=self.num_ranks, capacity=capacity
        )
        self._stopped = None
        return capacity

    def stop_record(self) -> int:
        """Record no more; how many steps there are to write. Raises `DataError` when no record is running."""
        if self._recorder is None:
            raise DataError("no expert distribution record is running")
        self._stopped, self._recorder = self._recorder, None
        return len(self._stopped)

    def write_record(self, path: Path) -> int:
        """Write the stopped or running record as a trace file; how many steps it has.

        Raises:
            DataError: there is no record, no step was recorded, or the folder cannot be written.
            CapacityError: the disk is full.
        """
        recorder = self._recorder or self._stopped
        if recorder is None:
            raise DataError("there is no expert distribution record; start one first")
        trace = recorder.snapshot(path.stem, {"top_k": self._top_k})
        if trace is None:
            raise DataError("nothing was recorded: no step has run since the record was started")
        save_trace(path, trace)
        return trace.num_iterations

    def gauges(self) -> dict[str, Any]:
        """What the last step with tokens looked like, one value a layer."""
        per_rank_LG = self._last_shares_LEG.sum(1)
        loads_LE, parts_LN = self._last_LE, self._last_shares_LEG.reshape(self.num_layers, -1)
        home_E = np.arange(self.num_experts) * self.num_ranks // self.num_experts
        static_LG = np.stack([loads_LE[:, home_E == g].sum(1) for g in range(self.num_ranks)], axis=1)
        accuracy = [
            None if predicted is None or not actual_E.any() else float(load_accuracy(predicted, actual_E))
            for predicted, actual_E in zip(self._last_predicted, loads_LE, strict=True)
        ]
        return {
            "balancedness": _max_over_mean(per_rank_LG),
            "balancedness_static": _max_over_mean(static_LG),
            "balancedness_planned": [
                None if predicted is None or not predicted.any() else _planned(predicted, ready_EG)
                for predicted, ready_EG in zip(self._last_predicted, self._last_ready_LEG, strict=True)
            ],
            "cv_before": [_variation(row) for row in loads_LE],
            "cv_after": [_variation(row) for row in parts_LN],
            "replicas": self._last_ready_LEG.sum(2).tolist(),
            "accuracy": accuracy,
            "distance": self._distance,
        }

    def report(self) -> dict[str, Any]:
        """The running sums and the gauges, as plain values."""
        return {
            "tokens": self.tokens_LE.tolist(),
            "rank_tokens": self.rank_tokens_LG.tolist(),
            "layer_s": [times.report() for times in self.layer],
            "straggler_s": [times.report() for times in self.straggler],
            **{f"{name}_s": [getattr(self, name).report()] for name in PARTS},
            **self.gauges(),
        }


def _planned(predicted_E: Ints, ready_EG: NDArray[np.bool_]) -> float:
    """Max over mean rank load, were predicted tokens what came and were they divided evenly over ready replicas."""
    loads_G = (predicted_E / np.maximum(1, ready_EG.sum(1))) @ ready_EG
    return _max_over_mean(loads_G[None])[0] if loads_G.any() else 1.0


def _max_over_mean(loads_LG: NDArray[Any]) -> list[float]:
    """The largest rank load over the mean, 1 is even; 1 also for no load."""
    means = loads_LG.mean(1)
    return np.divide(loads_LG.max(1), means, out=np.ones(len(means)), where=means > 0).tolist()


def _variation(loads: Ints) -> float:
    """Standard deviation over mean of the loads above 0 (the paper's CV); 0 without load."""
    used = loads[loads > 0]
    return float(used.std() / used.mean()) if len(used) else 0.0
