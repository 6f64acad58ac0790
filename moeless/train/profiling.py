"""`moeless profile`: how well each layer's routing is known d layers ahead without training, and how skewed loads are.

Scores accumulate batch by batch while the model runs (`profiler`), so memory does not grow with the number of tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moeless.config.model import CaptureConfig
from moeless.config.profile import ProfileConfig
from moeless.errors import UsageError
from moeless.files import require_free_bytes, require_writable, write_json
from moeless.models.checkpoint import LoadedModel, config_hash, load_model
from moeless.models.predictor import Predictor, make_predictor, read_entries
from moeless.models.predictor_file import gates_hash, read_predictors
from moeless.models.probe import ProbedLayer, probe_layers
from moeless.result import result_header
from moeless.train.capture import WorkItem, capture_batches, plan_work
from moeless.train.data import Corpus, load_corpus
from moeless.train.profile_report import build_result, draw_profile
from moeless.train.profiler import Profiler
from moeless.train.store import CaptureStore
from moeless.train.taps import Channel
from moeless.train.tokens import TokenDocument, documents_hash, tokenize_corpus

STORE_BUDGET_BYTES = 256 * 2**20
"""Captured rows held in memory before they spill to disk."""
_DEFAULT_POSITIONS = 4_096


def run_profile(config: ProfileConfig) -> dict[str, Any]:
    """Profile a model, write `profile.json` and the pictures to `config.out`, and give the result.

    Raises:
        MoelessError: unusable model or data, distances beyond the model's depth, or a full disk.
    """
    require_writable(config.out)
    loaded = load_model(config)
    if config.distances[-1] >= len(loaded.layers):
        raise UsageError(
            f"--distance {config.distance} needs more than {config.distances[-1]} MoE layers; "
            f"{config.model!r} has {len(loaded.layers)}"
        )
    corpus, documents, work = prepare_work(config, loaded)
    points = probe_layers(loaded.model, loaded.layers, loaded.input_device)
    tuned = _tuned_predictors(config, loaded, points)
    plain = config.capture is None and config.predictors is None
    channels: tuple[Channel, ...] = ("residual",) if plain else ("residual", "layer_input")
    store = open_store(config, loaded, documents, channels, work, config.capture) if config.capture else None
    profiler = Profiler(points, config.distances, tuned)
    with torch.no_grad():
        for rows in capture_batches(loaded, points, work, channels=channels, seed=config.seed, store=store):
            profiler.add(rows)
    result = {
        **result_header("moeless.profile/1", "live", config),
        **build_result(profiler, config.metric, config.threshold),
        "model": {
            "name": config.model,
            "family": loaded.model.config.model_type,
            "config_sha256": config_hash(loaded.model.config),
            "num_moe_layers": len(points),
            "num_experts": profiler.num_experts,
            "top_k": [p.top_k for p in points],
            "router_reads_norm": [p.norm is not None for p in points],
        },
        "data": describe_corpus(corpus, documents),
    }
    if config.predictors is not None:
        _note_tuning_corpus(config.predictors, result["data"])
    config.out.mkdir(parents=True, exist_ok=True)
    result["pictures"] = draw_profile(result, config.out)
    write_json(config.out / "profile.json", result)
    return result


def _tuned_predictors(config: ProfileConfig, loaded: LoadedModel, points: list[ProbedLayer]) -> list[Predictor]:
    """What `--predictors` holds for the distances asked for, and for layers' own input before attention."""
    if config.predictors is None:
        return []
    entries = read_entries(config.predictors, loaded.model, points)
    wanted = [entry for entry in entries if entry.distance in (0, *config.distances)]
    made = [make_predictor(points[entry.target_layer], entry) for entry in wanted]
    return [predictor for predictor in made if predictor is not None]


def _note_tuning_corpus(folder: Path, data: dict[str, Any]) -> None:
    """Say so when predictors are measured on the corpus they were tuned on."""
    if read_predictors(folder)[0].get("data", {}).get("name") == data["name"]:
        data["notes"].append(
            "the predictors were tuned on documents of this corpus; their own file has held-out numbers"
        )


def prepare_work(config: CaptureConfig, loaded: LoadedModel) -> tuple[Corpus, list[TokenDocument], list[WorkItem]]:
    """Read the data, tokenize it and lay out the capture. Raises `DataError` when there is nothing to run."""
    corpus = load_corpus(config.data)
    text_config = loaded.model.config.get_text_config()
    max_positions = getattr(text_config, "max_position_embeddings", None) or _DEFAULT_POSITIONS
    documents = tokenize_corpus(
        corpus,
        loaded.tokenizer,
        max_tokens=config.max_tokens,
        max_length=min(config.max_length, max_positions),
        vocab_size=text_config.vocab_size,
        seed=config.seed,
    )
    return corpus, documents, plan_work(documents, config, max_positions)


def open_store(
    config: CaptureConfig,
    loaded: LoadedModel,
    documents: list[TokenDocument],
    channels: tuple[Channel, ...],
    work: list[WorkItem],
    folder: Path | None,
    budget_bytes: int = STORE_BUDGET_BYTES,
) -> CaptureStore:
    """A store for this capture, after checking that a folder's disk can hold it."""
    fingerprint = {
        "model_config_sha256": config_hash(loaded.model.config),
        "gates_sha256": gates_hash(loaded.layers),
        "documents_sha256": documents_hash(documents),
        "channels": list(channels),
        "dtype": str(loaded.model.dtype),
        "seed": config.seed,
        "batch_tokens": config.batch_tokens,
        "decode_tokens": config.decode_tokens,
        "decode_batch": config.decode_batch,
    }
    store = CaptureStore(folder, fingerprint, budget_bytes)
    if folder is not None and not store.complete:
        hidden_bytes = loaded.model.config.get_text_config().hidden_size * loaded.model.dtype.itemsize
        num_tokens = sum(item.num_tokens for item in work[store.num_items :])
        num_bytes = num_tokens * len(loaded.layers) * (len(channels) + 1) * hidden_bytes
        require_free_bytes(folder, num_bytes, f"a capture of {num_tokens:,} tokens")
    return store


def describe_corpus(corpus: Corpus, documents: list[TokenDocument]) -> dict[str, Any]:
    """What a result file says of its data."""
    return {
        "name": corpus.name,
        "num_documents_read": len(corpus.documents),
        "num_documents_used": len(documents),
        "num_bad_rows": corpus.num_bad_rows,
        "bad_rows": corpus.bad_rows,
        "notes": corpus.notes,
        "tokens_sha256": documents_hash(documents),
    }
