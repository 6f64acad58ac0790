"""What the service says no to before it has read a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from moeless.config.serve import ServeConfig
from moeless.engine.front import Front
from moeless.engine.prometheus import ServiceMetrics
from moeless.engine.server.service import Service
from moeless.engine.supervisor import RankTeam


def test_a_group_that_has_grown_takes_more() -> None:
    """What is refused unread is what the ranks there are now have no room for, not those there were at the start."""
    config = ServeConfig(model="m", max_seqs=2, max_queued=2)
    metrics = ServiceMetrics("m", expert_detail=True)
    front = Front(config, metrics)
    service = Service(config=config, front=front, metrics=metrics)
    front.ledger.num_live = 4
    assert service.refusal("/v1/completions") is not None
    assert service.refusal("/tokenize") is None
    front._team = cast(RankTeam, SimpleNamespace(target=2))
    assert service.refusal("/v1/completions") is None
    front.ledger.num_live = 6
    assert service.refusal("/v1/chat/completions") is not None
