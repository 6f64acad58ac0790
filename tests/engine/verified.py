"""One rank of an engine with `--verify`; runs in the processes of `tests.engine.ranks`."""

from __future__ import annotations

from typing import Any

import torch

from moeless.config.engine import EngineConfig
from moeless.engine.engine import Engine
from moeless.engine.ep import RankGroup
from moeless.engine.submission import Submission
from tests.engine.serving import greedy


def run_verified(
    group: RankGroup, *, config: dict[str, Any], prompts: list[list[int]], garbage_on: int | None = None
) -> dict[str, Any]:
    """Two prompts a rank to their ends; the rank's statistics.

    Args:
        garbage_on: the rank on which one number in every slot of layer 1 is not what it should be.
    """
    engine = Engine(EngineConfig(ep=group.size, max_batch_tokens=24, kv_tokens=256, **config), group)
    assert engine.experts is not None
    if group.rank == garbage_on:
        with torch.inference_mode():
            for expert in range(engine.experts.pool.num_experts):
                for weight in (engine.experts.pool.weights(1, expert) or {}).values():
                    weight.view(-1)[0] += 5
    for i in (2 * group.rank, 2 * group.rank + 1):
        params = greedy(8, ignore_eos=True)
        engine.submit(Submission(request_id=str(i), index=0, prompt=prompts[i], params=params, seed=i))
    rest_s = 0.0
    while not rest_s:
        _, rest_s = engine.step()
    statistics = engine.statistics()
    engine.close()
    return {**statistics["experts"], "steps": statistics["steps"]}
