"""The process of one rank: `python -m moeless.engine.rank`, started by `launch.RankProcesses`.

It loads the model, and then is a rank of one group after the other, as the starter says (`Form`): when a group breaks,
because another rank was lost, this one keeps its weights and waits for the next. Its order comes as one JSON line on
stdin, which the starter then keeps open: when that ends, the starter is gone and so is this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from moeless.config.engine import EngineConfig
from moeless.engine.channel import RankChannel, start_pulse
from moeless.engine.engine import Engine
from moeless.engine.ep import EpGroup, RankGroup
from moeless.engine.messages import (
    Abort,
    Advanced,
    AskStatistics,
    Broken,
    Failed,
    Form,
    Formed,
    Loaded,
    Numbered,
    Progress,
    Record,
    Recorded,
    Statistics,
    Stop,
    Submit,
    ToRank,
)
from moeless.engine.rank_order import RankOrder
from moeless.engine.routed_experts import to_npy
from moeless.engine.sequence import Sequence
from moeless.engine.store import Store, join_store
from moeless.engine.traffic import Traffic
from moeless.errors import CapacityError, MoelessError, RankError, UsageError
from moeless.models.checkpoint import pick_device

_JOIN_S = 10.0
"""Joining takes this long at least before it is given up; ranks that do are ready for it, so it takes moments."""


def serve_rank(engine: Engine, channel: RankChannel) -> None:
    """Take messages and step until told to stop, or to leave the group for another.

    Raises:
        RankError: another rank did not take part.
    """
    wake_s, stop, heard_asleep = 0.0, False, 0
    while not engine.is_stopped and not engine.is_parting:
        rest_s = wake_s - time.monotonic() if engine.heard == heard_asleep else 0.0
        for message in channel.receive(max(0.0, rest_s)):
            _take(engine, channel, message)
            stop |= isinstance(message, Stop)
        part = channel.has_form()
        if engine.heard == heard_asleep and time.monotonic() < wake_s and not part:
            continue
        num_run = engine.runner.num_tokens_run
        advanced, rest_s = engine.step(stop=stop, part=part)
        heard_asleep, wake_s = engine.heard, time.monotonic() + rest_s
        if advanced:
            num_tokens = engine.runner.num_tokens_run - num_run
            channel.send(Advanced([progress_of(sequence) for sequence in advanced], num_tokens))


def _take(engine: Engine, channel: RankChannel, message: ToRank) -> None:
    if isinstance(message, Numbered):
        engine.heard = message.number
    if isinstance(message, Submit):
        engine.submit(message.submission)
    elif isinstance(message, Abort):
        engine.abort(message.request_id)
    elif isinstance(message, AskStatistics):
        traffic = engine.traffic.report() if engine.group.rank == 0 else None
        channel.send(Statistics(engine.statistics(), traffic))
    elif isinstance(message, Record):
        channel.send(_record(engine.traffic, message))


def _record(traffic: Traffic, message: Record) -> Recorded:
    try:
        if message.action == "start":
            return Recorded(traffic.start_record(message.budget_bytes))
        return Recorded(traffic.stop_record() if message.action == "stop" else traffic.write_record(Path(message.path)))
    except MoelessError as error:
        return Recorded(0, str(error))


def progress_of(sequence: Sequence) -> Progress:
    """What to tell a front end of a sequence that has just advanced."""
    ended = sequence.finish_reason is not None
    has_token = sequence.finish_reason != "error" and sequence.num_output > 0
    routes_TLK = sequence.routes_TLK
    is_first, scored = has_token and sequence.num_output == 1, sequence.params.prompt_logprobs is not None
    return Progress(
        request_id=sequence.request_id,
        index=sequence.index,
        token=sequence.tokens[-1] if has_token else None,
        logprobs=sequence.logprobs[-1] if has_token and sequence.logprobs else None,
        finish_reason=sequence.finish_reason,
        output=sequence.output() if ended else None,
        prompt_logprobs=sequence.prompt_logprobs if scored and (is_first or ended) else None,
        routed_experts=to_npy(routes_TLK[: sequence.num_computed]) if ended and routes_TLK is not None else None,
        queue_s=sequence.started_s - sequence.arrived_s if is_first else None,
    )


def rank_device(config: EngineConfig, local_rank: int) -> EngineConfig:
    """`config` with a device of this rank's own: accelerators of a host are dealt out by local rank."""
    device = pick_device(config.device)
    if device.type == "cpu" or device.index is not None:
        return replace(config, device=str(device))
    return replace(config, device=f"{device.type}:{local_rank % torch.accelerator.device_count()}")


def _run(order: RankOrder, channel: RankChannel) -> None:
    config = rank_device(EngineConfig(**order.config), order.seat)
    torch.set_num_threads(order.num_threads)
    store = join_store(order.store_host, order.store_port, config.start_timeout)
    engine = Engine(config)
    channel.send(Loaded(engine.facts))
    place = _Place(config, store, channel)
    start_pulse(order.channel, order.member, lambda: place.group is not None and place.group.is_waiting)
    while (form := channel.take_form()) is not None and form.rank is not None:
        try:
            engine.join(place.take(form), form.cost)
            channel.send(Formed(form.generation, engine.cost))
            serve_rank(engine, channel)
        except (RankError, CapacityError, UsageError) as error:  # the sizes of this group may be what does not fit
            channel.send(Broken(form.generation, type(error).__name__, str(error)))
        if engine.is_stopped:
            break
    engine.close()


class _Place:
    """Where this process stands: the group it is a rank of, or was until that broke."""

    def __init__(self, config: EngineConfig, store: Store, channel: RankChannel) -> None:
        self.group: RankGroup | None = None
        self._config, self._store, self._channel = config, store, channel

    def take(self, form: Form) -> RankGroup:
        """Leave the group there is and join the one that `form` tells of. Raises `RankError`."""
        assert form.rank is not None, "who is to be no rank does not come here"
        if self.group is not None:
            self.group.close()
        self.group = EpGroup.connect(
            self._store,
            rank=form.rank,
            size=form.size,
            device=self._config.device,
            generation=form.generation,
            timeout_s=self._config.step_timeout,
            start_timeout_s=max(self._config.step_timeout, _JOIN_S),
            roll_call_s=0.0,  # the front end sees who is gone
            is_called_off=self._channel.has_form,
        )
        return self.group


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Read the order, be that rank, and say so when it fails."""
    order = RankOrder(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_starter, daemon=True).start()
    with RankChannel(order.channel, order.member) as channel:
        try:
            _run(order, channel)
        except MoelessError as error:
            channel.send(Failed(type(error).__name__, str(error)))
        except Exception:
            channel.send(Failed("", traceback.format_exc()))
    os._exit(0)  # collectives that a failure left behind must not keep the process


if __name__ == "__main__":
    main()
