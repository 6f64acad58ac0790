"""`moeless bench predictors`: every predictor trained and judged on the same captured tokens and the same split.

It makes the paper's figures 6, 7, 11 and 12 and its table 2 for one model. All accuracies are of the test part, which
nothing was trained or chosen on.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from moeless.bench.predictor_rows import Outcome, PredictorRows
from moeless.bench.predictors_report import draw_predictors
from moeless.bench.predictors_timing import microseconds
from moeless.config.predictors import PredictorsConfig
from moeless.files import write_json
from moeless.models.checkpoint import config_hash, load_model
from moeless.models.predictor import Predictor
from moeless.models.predictor_file import PredictorEntry
from moeless.progress import progress_bar
from moeless.result import result_header
from moeless.train.finetune import capture_rows, check_depth
from moeless.train.inputs import SourceRows
from moeless.train.pairs import PAGE_BYTES, Captured, Pair, PairTuner, plan_pairs, predict_rows
from moeless.train.profiler import HISTORY_ITERATIONS
from moeless.train.promoe import predict_promoe, train_promoe
from moeless.train.tuner import Recipe, promoe_parameters


def run_bench_predictors(config: PredictorsConfig) -> dict[str, Any]:
    """Compare predictors, write `predictors.json` and pictures to `config.out`, and give the result.

    Raises:
        MoelessError: unusable model or data, distances beyond the model's depth, or a full disk.
    """
    accelerator = Accelerator(cpu=config.device == "cpu")
    loaded = load_model(config)
    check_depth(config.distance, config.distances, loaded)
    captured, data = capture_rows(config, loaded, config.capture, accelerator)
    with closing(captured.store):
        comparison = _Comparison(config, captured, accelerator)
        comparison.run()
        result = {
            **result_header("moeless.bench.predictors/1", "live", config),
            "model": {
                "name": config.model,
                "family": loaded.model.config.model_type,
                "config_sha256": config_hash(loaded.model.config),
            },
            "data": data,
            "num_tokens": captured.split.counts(),
            "num_threads": torch.get_num_threads(),
            **comparison.rows.result(),
            "similarity": comparison.similarity(),
        }
    config.out.mkdir(parents=True, exist_ok=True)
    result["pictures"] = draw_predictors(result, config.out)
    write_json(config.out / "predictors.json", result)
    return result


class _Comparison:
    """Runs the predictors one after the other; what they scored is in `rows`."""

    def __init__(self, config: PredictorsConfig, captured: Captured, accelerator: Accelerator) -> None:
        self.config, self.captured, self.accelerator = config, captured, accelerator
        self.rows = PredictorRows(captured)
        self.pairs = plan_pairs(
            config.distances, len(captured.points), has_layer_input="layer_input" in captured.store.channels
        )
        if "layer_input" in captured.store.channels:  # all layers, to set pre-attention against gate-input
            known = {(p.distance, p.target) for p in self.pairs}
            self.pairs += [p for p in plan_pairs((), len(captured.points)) if (0, p.target) not in known]

    def run(self) -> None:
        """Do all that the configuration names."""
        names = self.config.names
        with progress_bar("compare", len(self.pairs), "layers") as advance:
            for pair in self.pairs:
                self._add_untrained(pair)
                for name, recipe in self._recipes():
                    self._add_tuned(name, pair, recipe)
                advance(1)
        for name in (n for n in ("promoe", "promoe-ce") if n in names):
            self._add_promoe(name)

    def similarity(self) -> list[dict[str, Any]]:
        """Mean cosine of the router inputs of two layers over the test part (figure 6a)."""
        rows = self.captured.test.rows_N
        found = []
        for distance in self.config.distances:
            for target in range(distance, len(self.captured.points)):
                x, y = (self.captured.store.column("gate_input", t)[rows].float() for t in (target - distance, target))
                cosine = float(torch.cosine_similarity(x, y, dim=-1).mean())
                found.append({"distance": distance, "target_layer": target, "cosine": cosine})
        return found

    def _recipes(self) -> list[tuple[str, Recipe]]:
        common: dict[str, Any] = {"epochs": self.config.epochs, "threshold": 1.0, "seed": self.config.seed}
        every = {
            "tuned-plain": Recipe(rank=0, loss="hard", **common),
            "tuned": Recipe(rank=None, loss="auto", **common),
        }
        return [(name, recipe) for name, recipe in every.items() if name in self.config.names]

    def _add_untrained(self, pair: Pair) -> None:
        names, captured, point = self.config.names, self.captured, self.captured.points[pair.target]
        outcome = Outcome(pair=pair)
        actual_NK = captured.ids(pair.target)[captured.test.rows_N].numpy()
        if "gate" in names:
            predictor = Predictor(point, source=pair.source, distance=pair.distance, device=captured.device)
            inputs = captured.source_rows(predictor)
            example = next(inputs.pages())[1]
            timing = microseconds(predictor.predict_normed, example)
            predicted_NK = predict_rows(predictor, inputs, captured.test.rows_N)
            self.rows.add("gate", outcome, predicted_NK, predict_us=timing)
        if "gate-normed" in names and pair.source == "gate-input" and self._has_residual(point.norm):
            normed = Predictor(point, source=pair.source, distance=pair.distance, device=captured.device)
            inputs = SourceRows(
                captured.store,
                "residual",
                pair.target - pair.distance,
                budget_bytes=PAGE_BYTES,
                device=captured.device,
                prepare=point.norm,
            )
            self.rows.add("gate-normed", outcome, predict_rows(normed, inputs, captured.test.rows_N))
        if "actual" in names:
            self.rows.add("actual", outcome, actual_NK)
        if "history" in names:
            self._add_history(outcome, actual_NK)

    def _has_residual(self, norm: torch.nn.Module | None) -> bool:
        return norm is not None and "residual" in self.captured.store.channels

    def _add_history(self, outcome: Outcome, actual_NK: np.ndarray) -> None:
        captured, target = self.captured, outcome.pair.target
        num_experts = captured.points[target].layer.num_experts
        actual_IE = captured.test.loads(actual_NK, num_experts)
        trained = captured.ids(target)[captured.split.train].numpy()
        before_E = np.bincount(trained.ravel(), minlength=num_experts)
        seen_IE = captured.test.history(actual_IE, before_E, HISTORY_ITERATIONS)
        top_IK = np.argsort(-seen_IE, axis=1, kind="stable")[:, : actual_NK.shape[1]]
        self.rows.add("history", outcome, top_IK[captured.test.iteration_N], loads_IE=seen_IE)

    def _add_tuned(self, name: str, pair: Pair, recipe: Recipe) -> None:
        tuner = PairTuner(self.captured, pair, recipe, "token_recall", self.accelerator)
        entry: PredictorEntry = tuner.tune()
        tuner.predictor.use(entry.weights)
        rows_N = self.captured.test.rows_N
        self.rows.add(
            name,
            Outcome(pair=pair, entry=entry),
            predict_rows(tuner.predictor, tuner.inputs, rows_N),
            num_parameters=entry.weights.num_parameters if entry.weights else 0,
            num_bytes=entry.weights.num_bytes if entry.weights else 0,
            fit_seconds=entry.seconds,
            predict_us=microseconds(tuner.predictor.predict_normed, next(tuner.inputs.pages())[1]),
        )

    def _add_promoe(self, name: str) -> None:
        captured, num_layers = self.captured, len(self.captured.points)
        sources = range(num_layers - self.config.distances[0])
        with progress_bar(name, len(sources), "layers") as advance:
            for source in sources:
                targets = [source + d for d in self.config.distances if source + d < num_layers]
                trained = train_promoe(
                    captured,
                    source,
                    targets,
                    cross_entropy=name == "promoe-ce",
                    epochs=self.config.promoe_epochs,
                    seed=self.config.seed + source,
                )
                inputs = SourceRows(
                    captured.store, "gate_input", source, budget_bytes=PAGE_BYTES, device=captured.device
                )
                for target in targets:
                    point = captured.points[target]
                    pair = Pair(source="gate-input", target=target, distance=target - source)
                    x_TH = next(inputs.pages())[1]
                    num_parameters = promoe_parameters(x_TH.shape[1], point.layer.num_experts)
                    net, top_k = trained.net, point.top_k
                    self.rows.add(
                        name,
                        Outcome(pair=pair, num_epochs=trained.num_epochs),
                        predict_promoe(net, inputs, captured.test.rows_N, target, top_k),
                        num_parameters=num_parameters,
                        num_bytes=4 * num_parameters,
                        fit_seconds=trained.seconds / len(targets),
                        predict_us=microseconds(partial(net.predict, target=target, top_k=top_k), x_TH),
                    )
                advance(1)
