"""The tokens that `moeless bench layers` runs: from a trace, or routed by a model's own routers on text.

Legend: L measured layers, I iterations, T tokens of all ranks in one, K experts a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.bench.workload import closed_loop, token_chunks
from moeless.config.layers import LayersConfig
from moeless.config.model import ModelConfig
from moeless.errors import DataError, UsageError
from moeless.models.checkpoint import load_model
from moeless.trace.formats import read_trace
from moeless.trace.loads import LoadTrace
from moeless.trace.routes import Routes, make_routes
from moeless.train.data import load_corpus
from moeless.train.tokens import tokenize_corpus

_DEMO_MODEL = Path(__file__).parent.parent.parent / "checkpoints" / "demo-moe"
_MODEL_TOKENS = 8_192
_DOCUMENT_TOKENS = 512
_NUM_LAYERS = 4


def load_routes(config: LayersConfig) -> Routes:
    """The routes asked for, with the measured layers only.

    Raises:
        DataError, UsageError, CheckpointError: a trace, layer or model that cannot be used.
    """
    if config.routes is None:
        routes = model_routes(config.model or str(_DEMO_MODEL), config.seed)
    else:
        source = read_trace(config.routes)
        routes = source.to_routes() if isinstance(source, LoadTrace) else source
    layers = config.layer_numbers
    if layers is None:
        spread = np.linspace(0, routes.num_layers - 1, min(_NUM_LAYERS, routes.num_layers))
        layers = tuple(round(layer) for layer in spread)
    return routes.select_layers(layers)


def compose(config: LayersConfig, routes: Routes) -> NDArray[np.int64]:
    """Expert ids [L, I, T, K] of the warm-up and the measured iterations; each rank takes T / ranks tokens in a row.

    Decode routes run as a closed loop of T sequences, others T consecutive tokens at a time.
    """
    num_tokens, num_iterations = config.tokens_per_rank * config.ep, config.warmup + config.iterations
    if routes.phase == "decode":
        batches = closed_loop(routes, num_tokens, num_iterations, config.seed)
    else:
        batches = token_chunks(routes, num_tokens, num_iterations)
    return np.stack([routes.ids_TLK[tokens].transpose(1, 0, 2) for tokens in batches.tokens], 1).astype(np.int64)


@torch.inference_mode()
def model_routes(model: str, seed: int) -> Routes:
    """The experts that a model's routers choose on the default text, document after document.

    Raises:
        CheckpointError: see `load_model`.
    """
    if model == str(_DEMO_MODEL) and not _DEMO_MODEL.is_dir():
        raise UsageError("the bundled demo model is not part of an installed package; give --model or --routes")
    loaded = load_model(ModelConfig(model=model))
    vocab_size = int(loaded.model.config.get_text_config().vocab_size)
    documents = tokenize_corpus(
        load_corpus(None),
        loaded.tokenizer,
        max_tokens=_MODEL_TOKENS,
        max_length=_DOCUMENT_TOKENS,
        vocab_size=vocab_size,
        seed=seed,
    )
    chosen: list[list[torch.Tensor]] = [[] for _ in loaded.layers]
    handles = []
    for layer in loaded.layers:

        def note(module: Any, inputs: Any, output: Any, layer: Any = layer) -> None:
            chosen[layer.ordinal].append(layer.ids_of(output, layer))

        handles.append(layer.router.register_forward_hook(note))
    try:
        for document in documents:
            loaded.model(torch.tensor([document.ids], device=loaded.input_device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    ids_TLK = torch.stack([torch.cat(parts) for parts in chosen], 1).cpu().numpy()
    if ids_TLK.shape[0] != sum(len(document.ids) for document in documents):
        raise DataError(f"the routers of {model!r} did not see each token once")
    offsets = np.cumsum([0, *(len(document.ids) for document in documents)])
    num_experts = loaded.layers[0].num_experts
    return make_routes(ids_TLK, name=Path(model).name, phase="prefill", offsets=offsets, num_experts=num_experts)
