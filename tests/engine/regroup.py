"""One rank's engine through groups of several sizes; runs in the processes of `tests.engine.ranks`."""

from __future__ import annotations

from typing import Any

from moeless.config.engine import EngineConfig
from moeless.engine.engine import Engine
from moeless.engine.ep import LocalGroup, RankGroup
from moeless.engine.submission import Submission
from tests.engine.serving import greedy


def alone_then_together_then_alone(
    group: RankGroup, *, model: str, prompt: list[int], balancer: str
) -> list[dict[str, Any]]:
    """A group of one, then `group`, where prices are measured, then one again; what each cost, and its tokens."""
    how: dict[str, Any] = {"scale_to_zero": True, "keep_alive": 600.0, "kv_tokens": 256}
    engine = Engine(EngineConfig(model=model, balancer=balancer, **how))  # type: ignore[arg-type]
    seen: list[dict[str, Any]] = []
    held: set[tuple[int, int]] = set()
    for each in (LocalGroup(), group, LocalGroup()):
        engine.join(each, engine.cost)
        assert engine.experts is not None
        pool = engine.experts.pool
        engine.submit(Submission(request_id="a", index=0, prompt=prompt, params=greedy(8, ignore_eos=True), seed=0))
        tokens: list[int] = []
        rest_s = 0.0
        while not rest_s:
            advanced, rest_s = engine.step()
            tokens = next((list(s.tokens[len(prompt) :]) for s in advanced), tokens)
        now = set(pool.loaded())
        seen.append(
            {
                "tokens": tokens,
                "loads": pool.stats.loads,
                "new": len(now - held),
                "held": len(now),
                "resident_bytes": pool.resident_bytes,
                "pool": id(pool),
            }
        )
        held = now
    engine.close()
    return seen
