"""The experts that transformers' own routers choose, and whether an engine's are the same."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from moeless.config.engine import EngineConfig
from moeless.engine.backends import _by_key
from moeless.engine.engine import Engine
from moeless.engine.ep import RankGroup
from moeless.engine.rank import progress_of
from moeless.engine.request import CompletionOutput, SamplingParams
from moeless.engine.submission import Submission
from moeless.models.family import find_moe_layers

NEAR_TIE = 1e-4


def run_routed(
    group: RankGroup, *, config: dict[str, Any], prompts: list[list[int]], params: Rows[SamplingParams]
) -> tuple[dict[int, CompletionOutput], dict[str, Any]]:
    """One rank of an engine, prompt i on rank i modulo their number: its completions as a front end gets them."""
    engine = Engine(EngineConfig(ep=group.size, **config), group)
    for i in range(group.rank, len(prompts), group.size):
        engine.submit(Submission(request_id=str(i), index=0, prompt=prompts[i], params=params[i], seed=i))
    ended, asleep = [], False
    while not asleep:
        advanced, asleep = engine.step()
        ended += [progress_of(sequence) for sequence in advanced if sequence.finish_reason is not None]
    statistics = engine.statistics()
    engine.close()
    return {int(name): done.output for (name, _), done in _by_key(ended).items()}, statistics


def reference_routes(model: PreTrainedModel, tokens: Rows[int]) -> tuple[np.ndarray, np.ndarray]:
    """What each router chooses for `tokens` in one pass: ids [T, L, K], and by how much [T, L].

    The last is the distance between the router's outputs of the last expert chosen and of the first one not chosen.
    """
    layers = find_moe_layers(model)
    ids: list[Any] = [None] * len(layers)
    margins: list[Any] = [None] * len(layers)

    def watch(layer: Any) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            chosen_TK = layer.ids_of(output, layer).reshape(len(tokens), -1)
            scores = next(t for t in outputs if t.is_floating_point() and t.shape[-1] == layer.num_experts)
            best_TE = scores.reshape(len(tokens), -1).float().sort(-1, descending=True).values
            num = chosen_TK.shape[1]
            ids[layer.ordinal], margins[layer.ordinal] = chosen_TK, best_TE[:, num - 1] - best_TE[:, num]

        return layer.router.register_forward_hook(hook)

    handles = [watch(layer) for layer in layers]
    try:
        with torch.inference_mode():
            model(torch.tensor([list(tokens)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(ids, 1).numpy(), torch.stack(margins, 1).numpy()


def check_routes(model: PreTrainedModel, tokens: Rows[int], routes_TLK: np.ndarray | None) -> None:
    """Fails unless the experts of `tokens` are those of the reference.

    Where they part first, in the order in which one depends on the other, the reference may be within `NEAR_TIE` of
    choosing otherwise; what comes after depends on that choice.
    """
    assert routes_TLK is not None
    ids_TLK, margins_TL = reference_routes(model, tokens)
    assert routes_TLK.shape == ids_TLK.shape
    assert routes_TLK.dtype == np.uint8
    differ_TL = (np.sort(routes_TLK, -1) != np.sort(ids_TLK, -1)).any(-1)
    if differ_TL.any():
        token, layer = np.argwhere(differ_TL)[0]
        margin = margins_TL[token, layer]
        assert margin < NEAR_TIE, f"token {token}, layer {layer}: {routes_TLK[token, layer]}, margin {margin}"


def routed(params: SamplingParams) -> SamplingParams:
    """The same, with the experts asked for."""
    return replace(params, return_routed_experts=True)
