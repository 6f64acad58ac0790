"""`moeless finetune`: from a checkpoint and text to a folder of predictors, tuned only where the router falls short.

Each (source, target layer) is done on its own and kept on disk as soon as it is done, so an interrupted run goes on
where it stopped, and several processes (`accelerate launch`) share the layers without talking to each other.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from moeless.config.finetune import FinetuneConfig
from moeless.config.model import CaptureConfig
from moeless.errors import CheckpointError, UsageError
from moeless.files import write_json
from moeless.models.checkpoint import LoadedModel, load_model
from moeless.models.predictor_file import (
    DESCRIPTION,
    TENSORS,
    PredictorEntry,
    fingerprint,
    no_source_entry,
    read_predictors,
    save_predictors,
)
from moeless.models.probe import probe_layers
from moeless.progress import progress_bar
from moeless.result import result_header
from moeless.train.capture import capture_batches
from moeless.train.pairs import Captured, Pair, PairTuner, plan_pairs
from moeless.train.profiling import describe_corpus, open_store, prepare_work
from moeless.train.taps import Channel
from moeless.train.tuner import Recipe

_PARTIAL = ".partial"


def run_finetune(config: FinetuneConfig) -> dict[str, Any] | None:
    """Fine-tune predictors, write them to `config.out` with `finetune.json`, and give the result.

    The first of several processes gives the result, the others None.

    Raises:
        MoelessError: unusable model or data, distances beyond the model's depth, or a full disk.
    """
    accelerator = Accelerator(cpu=config.device == "cpu")
    if accelerator.num_processes > 1 and config.capture is None:
        raise UsageError("several processes share one capture: give --capture with a folder all of them can read")
    loaded = load_model(config)
    check_depth(config.distance or "1", config.distances, loaded)
    with accelerator.main_process_first():
        captured, data = capture_rows(config, loaded, config.capture, accelerator)
    with closing(captured.store):
        base = {"base_model": config.model, "fingerprint": fingerprint(loaded.model, captured.points)}
        recipe = Recipe(
            rank=config.rank, loss=config.loss, epochs=config.epochs, threshold=config.threshold, seed=config.seed
        )
        settings = {**base, **dataclasses.asdict(recipe), "metric": config.metric, "tokens": data["tokens_sha256"]}
        finished_pairs = _FinishedPairs(config.out / _PARTIAL, settings)
        pairs = plan_pairs(
            config.distances, len(captured.points), has_layer_input="layer_input" in captured.store.channels
        )
        began_s = time.monotonic()
        tune_pairs(captured, pairs, recipe, config, accelerator, finished_pairs)
        accelerator.wait_for_everyone()
        entries = [entry for pair in pairs if (entry := finished_pairs.finished(pair))]
        entries += _without_source(entries, config, len(captured.points))
        result = {
            **result_header("moeless.finetune/1", "live", config),
            **summarise(entries, captured, time.monotonic() - began_s),
            "metric": config.metric,
            "threshold": config.threshold,
            "data": data,
        }
    if not accelerator.is_main_process:
        return None
    _write(config, result, base, entries)
    return result


def check_depth(flag: str, distances: tuple[int, ...], loaded: LoadedModel) -> None:
    """Raise `UsageError` when the model has no layer so far ahead."""
    if distances and distances[-1] >= len(loaded.layers):
        raise UsageError(
            f"--distance {flag} needs more than {distances[-1]} MoE layers; {loaded.name!r} has {len(loaded.layers)}"
        )


def capture_rows(
    config: CaptureConfig, loaded: LoadedModel, folder: Path | None, accelerator: Accelerator
) -> tuple[Captured, dict[str, Any]]:
    """Run the data through the model, or read what `folder` has of it; the split capture and a word on the data."""
    corpus, documents, work = prepare_work(config, loaded)
    points = probe_layers(loaded.model, loaded.layers, loaded.input_device)
    channels: tuple[Channel, ...] = ("residual", "layer_input") if folder else ("layer_input",)
    store = open_store(config, loaded, documents, channels, work, folder)
    if not store.complete:
        for _ in capture_batches(loaded, points, work, channels=channels, seed=config.seed, store=store):
            pass
    device = accelerator.device if accelerator.num_processes > 1 else loaded.input_device
    captured = Captured.split_up(
        points, store, seed=config.seed, batch_tokens=config.batch_tokens, device=torch.device(device)
    )
    return captured, describe_corpus(corpus, documents)


class _FinishedPairs:
    """Finished pairs on disk, each a predictor folder of its own, for the run with the same settings to go on."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings

    def finished(self, pair: Pair) -> PredictorEntry | None:
        """The pair's entry if a run with these settings has done it."""
        try:
            header, entries = read_predictors(self.folder / pair.key)
        except CheckpointError:
            return None
        return entries[0] if header["settings"] == self.settings else None

    def keep(self, pair: Pair, entry: PredictorEntry) -> None:
        """Put a finished pair where `finished` finds it."""
        save_predictors(self.folder / pair.key, {"settings": self.settings}, [entry])


def tune_pairs(
    captured: Captured,
    pairs: list[Pair],
    recipe: Recipe,
    config: FinetuneConfig,
    accelerator: Accelerator,
    finished_pairs: _FinishedPairs,
) -> None:
    """Do this process's share of the pairs that are not done yet, within `config.max_seconds`."""
    metric = config.metric.replace("-", "_")
    mine = [p for p in pairs[accelerator.process_index :: accelerator.num_processes] if not finished_pairs.finished(p)]
    end_s = time.monotonic() + (config.max_seconds or float("inf"))
    with progress_bar("fine-tune", len(mine), "layers") as advance:
        for number, pair in enumerate(mine):
            now_s = time.monotonic()
            deadline_s = now_s + (end_s - now_s) / (len(mine) - number)
            finished_pairs.keep(pair, PairTuner(captured, pair, recipe, metric, accelerator).tune(deadline_s))
            advance(1)


def summarise(entries: list[PredictorEntry], captured: Captured, seconds: float) -> dict[str, Any]:
    """Rows and totals of a result file."""
    weights = [entry.weights for entry in entries if entry.weights is not None]
    return {
        "layers": [entry.row() for entry in entries],
        "seconds_total": seconds,
        "num_parameters": sum(w.num_parameters for w in weights),
        "bytes": sum(w.num_bytes for w in weights),
        "num_tokens": captured.split.counts(),
    }


def _without_source(entries: list[PredictorEntry], config: FinetuneConfig, num_layers: int) -> list[PredictorEntry]:
    """Entries for layers that nothing known in time could predict."""
    covered = {entry.target_layer for entry in entries if entry.distance in (0, *config.distances[:1])}
    return [no_source_entry(layer) for layer in range(num_layers) if layer not in covered]


def _write(config: FinetuneConfig, result: dict[str, Any], base: dict[str, Any], entries: list[PredictorEntry]) -> None:
    """The predictor folder and the result; the finished pairs are only then removed."""
    kept = ("metric", "threshold", "num_tokens", "data", "versions", "git")
    header = {
        **base,
        **{name: result[name] for name in kept},
        "source": config.source,
        "distances": list(config.distances) or [0],
        "seed": config.seed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    save_predictors(config.out, header, entries)
    result["files"] = [str(config.out / name) for name in (TENSORS, DESCRIPTION, "finetune.json")]
    write_json(config.out / "finetune.json", result)
    shutil.rmtree(config.out / _PARTIAL, ignore_errors=True)
