"""What ranks are asked to do in tests; runs in the processes of `tests.engine.ranks`."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from moeless.config.model import ModelConfig
from moeless.engine.dispatch import combine, dispatch, plan_route
from moeless.engine.ep import Control, EpGroup, RankGroup, all_to_all
from moeless.engine.expert_layers import ExpertLayers, ExpertSettings, build_expert_layers
from moeless.engine.store import join_store
from moeless.errors import CheckpointError, RankError
from moeless.models.expert_store import ExpertStore, expert_bytes
from moeless.models.weights import load_skeleton
from moeless.policy.config import BalancerConfig
from moeless.policy.cost import TOKENS
from moeless.policy.deal import deal_row
from moeless.policy.types import EpShape, Ints, LayerPlan, Placement, moves, placement_of, static_placement
from moeless.trace.recorder import Recorder


def talk(group: RankGroup) -> dict[str, Any]:
    """Every collective once, with uneven and empty parts."""
    rank, size = group.rank, group.size
    table = group.exchange(torch.full((3,), rank, dtype=torch.int32))
    word = group.control(Control(has_work=rank == 1, part=rank, time_us=7 if rank == 0 else 0))
    send = [(rank + to) % 3 for to in range(size)]
    receive = [(source + rank) % 3 for source in range(size)]
    rows = torch.cat([torch.full((n, 2), float(10 * rank + to)) for to, n in enumerate(send)])
    got = all_to_all(group, rows, send, receive)
    return {"table": table.tolist(), "word": word, "got": got[:, 0].tolist(), "receive": receive}


def fall_silent(group: RankGroup, culprit: int, how: str) -> str:
    """One rank dies or hangs; what the others are told."""
    if group.rank == culprit:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    try:
        for _ in range(3):
            group.exchange(torch.zeros(4, dtype=torch.int32))
    except RankError as error:
        return str(error)
    return "nothing"


def leave(group: RankGroup) -> str:
    """Rank 0 leaves while rank 1 waits for it; what rank 1 is told, and after how long."""
    begin = time.monotonic()
    if group.rank == 0:
        time.sleep(1)
        group.close()
        time.sleep(5)  # its process and the object live on
        return ""
    try:
        group.exchange(torch.zeros(4, dtype=torch.int32))
    except RankError as error:
        return f"{time.monotonic() - begin:.1f} {error}"
    return "nothing"


def cpu_while_waiting(group: RankGroup, wait_s: float) -> float:
    """CPU seconds that a rank spends in `control` while rank 0 comes `wait_s` late."""
    if group.rank == 0:
        time.sleep(wait_s)
    begin = time.process_time()
    group.control(Control())
    return time.process_time() - begin


def route_rows(group: RankGroup, seed: int, num_tokens: list[int], top_k: int, num_experts: int) -> dict[str, Any]:
    """Dispatch and combine under random shares; experts multiply rows by their number plus one."""
    tokens = [_tokens(seed, source, n, top_k, num_experts) for source, n in enumerate(num_tokens)]
    counts_GE = np.stack([np.bincount(ids.reshape(-1), minlength=num_experts) for _, ids, _ in tokens])
    shares_EG = random_shares(np.random.default_rng(seed), counts_GE.sum(0), group.size)
    x_TH, ids_TK, weights_TK = tokens[group.rank]
    receive_EG = deal_row(np.ascontiguousarray(shares_EG.T), counts_GE.T, group.rank)
    route = plan_route(ids_TK, deal_row(counts_GE, shares_EG, group.rank), receive_EG.T)
    rows_RH = dispatch(x_TH, top_k, route, group)()
    owner_R = torch.repeat_interleave(torch.arange(num_experts), torch.tensor(route.counts_E))
    out_TH = combine(rows_RH * (owner_R + 1).unsqueeze(-1), weights_TK, route, group)
    return {"out": out_TH, "computed": route.counts_E, "shares": shares_EG[:, group.rank].tolist()}


def _tokens(seed: int, rank: int, num: int, top_k: int, num_experts: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.rand(num, num_experts, generator=generator).argsort(1)[:, :top_k]
    return torch.randn(num, 6, generator=generator), ids, torch.rand(num, top_k, generator=generator)


def random_shares(rng: np.random.Generator, counts_E: Ints, num_ranks: int) -> Ints:
    """Any division of counts over ranks [E, G]."""
    return np.stack([rng.multinomial(n, rng.dirichlet(np.full(num_ranks, 0.5))) for n in counts_E]).astype(np.int64)


class RandomBalancer:
    """New places and divisions in every iteration, the same on all ranks; nothing about it is sensible."""

    config = BalancerConfig(loads="predicted", scale="cv", place="warm", split="even")

    def __init__(self, shape: EpShape, seed: int) -> None:
        self._shape, self._seed = shape, seed
        self.broken = ""

    def initial(self, layer: int) -> Placement:
        return static_placement(self._shape.num_experts, self._shape.num_ranks)

    def plan(self, iteration: int, layer: int, predicted_E: Any, resident: Placement) -> LayerPlan:
        if self.broken == "planner":
            raise ArithmeticError("the planner is broken")
        rng = np.random.default_rng((self._seed, iteration, layer))
        room = [self._shape.slots_per_rank] * self._shape.num_ranks
        hosts: list[set[int]] = []
        for _ in range(self._shape.num_experts):  # a home each where there is most room, then more at random
            rank = max(range(len(room)), key=lambda g: (room[g], rng.random()))
            room[rank] -= 1
            hosts.append({rank})
        for expert in rng.permutation(self._shape.num_experts)[: self._shape.num_extra].tolist():
            rank = int(rng.integers(self._shape.num_ranks))
            if room[rank] and rank not in hosts[expert]:
                room[rank] -= 1
                hosts[expert].add(rank)
        placement = placement_of(hosts)
        copies, drops = moves(resident, placement)
        return LayerPlan(placement, tuple(copies), tuple(drops))

    def split(self, layer: int, counts_E: Ints, ready: Placement) -> Ints:
        if self.broken == "divider":
            return np.zeros((len(ready), self._shape.num_ranks), np.int64)
        rng = np.random.default_rng((self._seed, layer, int(counts_E.sum())))
        shares_EG = np.zeros((len(ready), self._shape.num_ranks), np.int64)
        for expert, ranks in enumerate(ready):
            if counts_E[expert]:
                weights = rng.dirichlet(np.full(len(ranks), 0.5))
                shares_EG[expert, list(ranks)] = rng.multinomial(counts_E[expert], weights)
        return shares_EG

    def observe(self, iteration: int, layer: int, counts_E: Ints, shares_EG: Ints) -> None:
        pass


def generate(
    group: RankGroup,
    folder: str,
    prompts: list[list[list[int]]],
    num_new: int,
    balancer: str = "random",
    begin: tuple[int, ...] = (0, 0, 0, 0),
    num_slots: int | None = None,
    budget_experts: float | None = None,
    predict: bool = False,
    settle_loads: bool = False,
    fault: str = "",
    replayable: bool = False,
) -> dict[str, Any]:
    """Greedy tokens of this rank's prompts (all of one length), every step recomputed from the start.

    Args:
        prompts: those of each rank.
        begin: the step at which each rank joins; before and after its own tokens it idles.
        budget_experts: memory in experts, less than the model has or more.
        predict: predict layer l+1 with its own router from layer l's input.
        settle_loads: wait for the loader after every step, so that replicas move in time.
        replayable: price plans in tokens, not in what this machine is measured to take.
        fault: what goes wrong: `slow`, `unreadable` or `killed` loads, or a `planner` or `divider` that
            fails from the third step.
    """
    loaded, store = load_skeleton(ModelConfig(model=folder))
    shape = EpShape(store.num_experts, group.size, num_slots or store.num_experts + group.size)
    recorder = Recorder(
        num_layers=len(loaded.layers), num_experts=store.num_experts, num_ranks=group.size, capacity=256
    )
    layers = build_expert_layers(
        loaded.model,
        loaded.layers,
        store,
        group,
        ExpertSettings(
            balancer=RandomBalancer(shape, 3) if balancer == "random" else balancer,
            cost=TOKENS if replayable else None,
            num_slots=shape.num_slots,
            budget_bytes=None if budget_experts is None else round(budget_experts * expert_bytes(store)),
        ),
        predictors=[None, *(layer.route for layer in loaded.layers[1:])] if predict else (),
        recorder=recorder,
    )
    layers.load_initial()
    if fault in ("slow", "unreadable", "killed"):
        break_background_loads(layers, store, fault)
    ids = torch.tensor(prompts[group.rank]) if prompts[group.rank] else torch.empty(0, 1, dtype=torch.int64)
    num_prompt, step = ids.shape[1], 0
    placements = []
    while True:
        working = bool(ids.numel()) and step >= begin[group.rank] and ids.shape[1] < num_prompt + num_new
        later = bool(ids.numel()) and step < begin[group.rank]
        word = group.control(Control(has_work=working or later, time_us=step * 1000 if group.rank == 0 else 0))
        if not word.has_work:
            break
        if fault in ("planner", "divider") and step == 2:
            layers.controller._balancer.broken = fault
        layers.begin_step(word.time_us)
        if working:
            with torch.inference_mode():
                logits = loaded.model(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        else:
            layers.idle_step()
        layers.end_step("mixed", num_tokens=0)
        if settle_loads:
            layers.pool.wait_idle()
        placements.append(layers.controller.placements)
        step += 1
    wrong = _slots_equal_their_experts(layers, store)
    layers.close()
    trace = recorder.snapshot("test")
    return {
        "tokens": ids[:, num_prompt:].tolist(),
        "metrics": layers.metrics(),
        "counts": None if trace is None else trace.counts_ILE,
        "rank_counts": None if trace is None else trace.rank_counts_ILGE,
        "trace": trace,
        "placements": placements,
        "wrong_slots": wrong,
    }


def generate_through_a_death(
    group: RankGroup, folder: str, prompts: list[list[list[int]]], num_new: int, port: int, generation: int
) -> dict[str, Any]:
    """Three ranks, of which the last is killed in its third step; the others form a group of two and go on."""
    loaded, store = load_skeleton(ModelConfig(model=folder))
    settings = ExpertSettings(balancer="moeless", budget_bytes=18 * expert_bytes(store))
    layers = build_expert_layers(loaded.model, loaded.layers, store, group, settings)
    layers.load_initial()
    ids = torch.tensor(prompts[group.rank])
    num_prompt, step, loads_before = ids.shape[1], 0, 0
    told = ""
    while ids.shape[1] < num_prompt + num_new:
        try:
            layers.begin_step(group.control(Control(has_work=1, time_us=step * 1000)).time_us)
            if step == 2 and group.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.inference_mode():
                logits = loaded.model(ids, use_cache=False).logits[:, -1]
        except RankError as error:
            told = str(error)
            group.close()
            new_store = join_store("127.0.0.1", port, timeout_s=30)
            group = EpGroup.connect(new_store, rank=group.rank, size=2, generation=generation, timeout_s=20)
            loads_before = layers.pool.stats.loads
            layers = build_expert_layers(loaded.model, loaded.layers, store, group, settings, pool=layers.pool)
            layers.load_initial()
            continue
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        step += 1
    wrong = _slots_equal_their_experts(layers, store)
    layers.close()
    group.close()
    return {
        "tokens": ids[:, num_prompt:].tolist(),
        "told": told,
        "wrong_slots": wrong,
        "loads": (loads_before, layers.pool.stats.loads),
    }


def break_background_loads(layers: ExpertLayers, store: ExpertStore, fault: str) -> None:
    """Make every background load late: it ends only after its layer has been told what is ready.

    With the faults `unreadable` and `killed` every second one goes wrong then.
    """
    pool = layers.pool
    read_into, states, request = store.read_into, pool.states, pool.request
    calls, looked = itertools.count(), threading.Condition()
    num_looks: Counter[int] = Counter()
    asked_at: dict[tuple[int, int], int] = {}

    def states_seen(layer: int) -> Any:
        seen = states(layer).copy()
        with looked:
            num_looks[layer] += 1
            looked.notify_all()
        return seen

    def noted_request(layer: int, expert: int) -> None:
        asked_at[layer, expert] = num_looks[layer]
        request(layer, expert)

    def harmed(layer: int, expert: int, out: dict[str, torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            with looked:
                assert looked.wait_for(lambda: num_looks[layer] > asked_at[layer, expert], timeout=20)
            goes_wrong = next(calls) % 2 == 1
            if goes_wrong and fault == "unreadable":
                raise CheckpointError(f"cannot read expert {expert} of MoE layer {layer}: Input/output error")
            if goes_wrong and fault == "killed":
                raise SystemExit  # ends the thread without a word
        read_into(layer, expert, out)

    store.read_into = harmed  # type: ignore[method-assign]
    pool.states, pool.request = states_seen, noted_request  # type: ignore[method-assign]


def _slots_equal_their_experts(layers: ExpertLayers, store: ExpertStore) -> list[tuple[int, int]]:
    """Warm slots whose weights are not their logical expert's, bit for bit."""
    wrong = []
    for layer in range(len(layers.blocks)):
        for expert in range(store.num_experts):
            slot = layers.pool.weights(layer, expert)
            if slot is not None:
                reference = store.read_reference(layer, expert)
                wrong += [(layer, expert) for name in slot if not torch.equal(slot[name], reference[name])]
    return wrong
