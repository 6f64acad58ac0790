"""One rank of an engine that is left without work, by a clock of the test's own; runs in `tests.engine.ranks`, too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from moeless.config.engine import EngineConfig
from moeless.engine.engine import Engine
from moeless.engine.ep import Control, RankGroup
from moeless.engine.submission import Submission
from tests.engine.serving import greedy

KEEP_ALIVE_S = 80.0


class Clocked:
    """An engine scaled to zero whose shared clock stands still but when told to go on."""

    def __init__(self, group: RankGroup, **config: Any) -> None:
        self.now_us = 7_000_000_000
        control = group.control

        def at_our_time(word: Control) -> Control:
            return replace(control(word), time_us=self.now_us)

        group.control = at_our_time  # type: ignore[method-assign]
        self.engine = Engine(
            EngineConfig(ep=group.size, kv_tokens=256, scale_to_zero=True, keep_alive=KEEP_ALIVE_S, **config), group
        )
        assert self.engine.experts is not None
        self.pool, self.meters = self.engine.experts.pool, self.engine.experts.controller.meters
        self.rank = group.rank

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[dict[int, list[int]], float]:
        """Every second prompt on rank 1, if there is one; this rank's tokens, and how long to rest after them."""
        engine = self.engine
        made: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            if i % engine.group.size == self.rank:
                params = greedy(num_tokens, ignore_eos=True)
                engine.submit(Submission(request_id=str(i), index=0, prompt=prompt, params=params, seed=i))
        rest_s = 0.0
        while not rest_s:
            advanced, rest_s = engine.step()
            made |= {int(s.request_id): list(s.output().token_ids) for s in advanced if s.finish_reason is not None}
        return made, rest_s

    def look(self, rest_s: float) -> float:
        """Rest for so long and look what is due; the next rest."""
        self.now_us += round(rest_s * 1e6)
        advanced, rest_s = self.engine.step()
        assert not advanced
        return rest_s


def run_to_zero(group: RankGroup, *, config: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Prompts, nothing until all experts have left, the same prompts again, and once more in the middle of a drop."""
    clocked = Clocked(group, **config)
    pool = clocked.pool
    seen: dict[str, Any] = {"bytes": [pool.resident_bytes], "rests": [], "cold": []}
    seen["first"], rest_s = clocked.run(prompts, 8)
    while rest_s < math.inf:
        seen["rests"].append(rest_s)
        rest_s = clocked.look(rest_s)
    seen["bytes"].append(pool.resident_bytes)
    before = clocked.meters.cold
    seen["after"], _ = clocked.run(prompts, 8)
    seen["bytes"].append(pool.resident_bytes)
    seen["cold"].append(clocked.meters.cold - before)

    clocked.now_us += round(KEEP_ALIVE_S * 5e5)
    clocked.run(prompts[:1], 1)  # holds the experts of one prompt; those of the others are due half a keep-alive later
    clocked.look(KEEP_ALIVE_S * 0.7)
    seen["bytes"].append(pool.resident_bytes)
    before = clocked.meters.cold
    seen["middle"], rest_s = clocked.run(prompts, 8)
    seen["cold"].append(clocked.meters.cold - before)
    seen["expired"] = clocked.meters.expired
    clocked.engine.close()
    return seen
