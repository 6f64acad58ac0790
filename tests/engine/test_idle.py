"""Scale to zero: experts leave an idle service, and the next request brings them back; tokens are as ever."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from moeless import LLM
from moeless.config.engine import EngineConfig
from moeless.engine.channel import FrontChannel, RankChannel
from moeless.engine.engine import Engine
from moeless.engine.ep import LocalGroup
from moeless.engine.messages import Advanced, AskStatistics, Statistics, Stop, Submit
from moeless.engine.rank import serve_rank
from moeless.engine.submission import Submission
from moeless.errors import UsageError
from tests.engine.idle import KEEP_ALIVE_S, run_to_zero
from tests.engine.ranks import RankPool
from tests.engine.serving import greedy, greedy_reference, near_tie, random_prompts

EXPERT_BYTES = 294_912


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype="float32").eval()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "how",
    [{}, {"balancer": "static"}, {"balancer": "static", "expert_memory_gb": 0.02}],
    ids=["replicas", "static", "budget-below-model"],
)
def test_experts_leave_and_come_back(
    ranks: RankPool, demo: PreTrainedModel, demo_model: Path, size: int, how: dict[str, Any]
) -> None:
    prompts = random_prompts((4, 2, 3), demo.config.vocab_size)
    expected = greedy_reference(demo, prompts, 8)
    arguments: dict[str, Any] = {"config": {"model": str(demo_model), **how}, "prompts": prompts}
    seen = [run_to_zero(LocalGroup(), **arguments)] if size == 1 else ranks.run(run_to_zero, size, **arguments)
    for phase in ("first", "after", "middle"):
        made = {i: tokens for rank in seen for i, tokens in rank[phase].items()}
        assert sorted(made) == [0, 1, 2]
        for i, tokens in made.items():
            assert tokens == expected[i] or near_tie(demo, prompts[i], tokens, expected[i])
    for rank in seen:
        assert rank["rests"] == seen[0]["rests"]  # all look at the same times
        assert all(KEEP_ALIVE_S / 8 <= rest_s < KEEP_ALIVE_S * 1.126 for rest_s in rank["rests"])
        assert len(rank["rests"]) <= 8
        assert rank["bytes"][1] == 0
    assert min(seen[0]["cold"]) > 0
    if how:  # what is in memory does not depend on what an expert is measured to take
        full, _, again, middle = (sum(rank["bytes"][i] for rank in seen) // EXPERT_BYTES for i in range(4))
        assert full == (0 if "expert_memory_gb" in how else 12 * 16)
        assert 0 < middle < again < 12 * 16  # only what has tokens comes back, and a part of it leaves


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[tuple[FrontChannel, RankChannel]]:
    front = FrontChannel(f"ipc://{tmp_path}/ranks")
    rank = RankChannel(front.address, 0)
    rank.send(Advanced([]))  # the front can only answer who has spoken
    assert front.receive(60) is not None
    yield front, rank
    front.close()
    rank._socket.close(linger=0)


def test_an_idle_rank_wakes_itself_until_nothing_is_left(
    demo_model: Path, channels: tuple[FrontChannel, RankChannel]
) -> None:
    front, channel = channels
    config = EngineConfig(model=str(demo_model), kv_tokens=256, scale_to_zero=True, keep_alive=0.4)
    engine = Engine(config, LocalGroup())
    rests: list[float] = []
    step = engine.step

    def counted(**how: bool) -> Any:
        advanced, rest_s = step(**how)
        rests.append(rest_s)
        return advanced, rest_s

    engine.step = counted  # type: ignore[method-assign]
    thread = threading.Thread(target=serve_rank, args=(engine, channel))
    thread.start()

    def resident_bytes() -> int:
        front.send(0, AskStatistics())
        while True:
            answer = front.receive(60)
            assert answer is not None
            if isinstance(answer[1], Statistics):
                return int(answer[1].values["experts"]["pool"]["resident_bytes"])

    def until_empty() -> None:
        deadline = time.monotonic() + 60
        while resident_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    until_empty()
    idle = [rest_s for rest_s in rests if rest_s]
    assert len(idle) == len(rests)
    assert idle[-1] == math.inf  # sleeps until the next message
    assert all(rest_s >= 0.05 for rest_s in idle)
    num_steps = len(rests)
    assert [resident_bytes() for _ in range(20)] == [0] * 20
    assert len(rests) == num_steps  # being asked wakes nobody
    prompt = random_prompts((5,), 4096)[0]
    params = greedy(4, ignore_eos=True)
    front.send(0, Submit(1, Submission(request_id="a", index=0, prompt=prompt, params=params, seed=0)))
    tokens: list[int] = []
    while len(tokens) < 4:
        answer = front.receive(60)
        assert answer is not None
        if isinstance(answer[1], Advanced):
            tokens += [p.token for p in answer[1].progress if p.token is not None]
    until_empty()
    assert rests[-1] == math.inf
    front.send(0, Stop(2))
    thread.join(60)
    assert not thread.is_alive()
    engine.close()


def test_what_cannot_scale_to_zero_is_refused(demo_model: Path) -> None:
    with pytest.raises(UsageError, match="--scale-to-zero needs a --keep-alive above 0"):
        EngineConfig(model=str(demo_model), scale_to_zero=True, keep_alive=0)
    with pytest.raises(UsageError, match="needs ranks that run while nobody calls them"):
        LLM(str(demo_model), scale_to_zero=True)
    assert EngineConfig(model=str(demo_model)).runs_whole
    assert not EngineConfig(model=str(demo_model), scale_to_zero=True).runs_whole
