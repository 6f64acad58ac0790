"""Where `LLM` runs completions: in this process, or on the rank processes it has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
import torch

from moeless.config.engine import EngineConfig
from moeless.engine.engine import Engine
from moeless.engine.ep import LocalGroup, RankGroup, all_to_all
from moeless.engine.facts import ModelFacts
from moeless.engine.launch import RankProcesses, TorchrunPlace, join_torchrun
from moeless.engine.messages import Abort, Advanced, AskStatistics, Progress, Statistics, Submit
from moeless.engine.rank import progress_of, rank_device
from moeless.engine.request import CompletionOutput, TokenLogprobs
from moeless.engine.routed_experts import from_npy
from moeless.engine.submission import Submission
from moeless.errors import MoelessError, UsageError

Key = tuple[str, int]
"""Request id and index of a completion."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion that has ended."""

    output: CompletionOutput
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


class Backend(Protocol):
    """One of the two below."""

    @property
    def facts(self) -> ModelFacts:
        """What requests are checked against."""
        ...

    def run(self, submissions: list[Submission]) -> dict[Key, Ended]:
        """Run all to their ends."""
        ...

    def statistics(self) -> list[dict[str, Any]]:
        """Each rank's numbers."""
        ...

    def close(self) -> None:
        """End; safe to call twice."""
        ...


def make_backend(config: EngineConfig, environment: Mapping[str, str]) -> Backend:
    """The ranks of `config`, ready for work: this process, torchrun's processes, or new ones.

    Raises:
        MoelessError: the model can't be loaded, or a rank failed.
    """
    place = TorchrunPlace.of(environment)
    is_here = config.ep == 1 or (place is not None and place.size > 1)
    if is_here and config.scale_to_zero:
        raise UsageError("scale_to_zero needs ranks that run while nobody calls them: serve, or ep > 1, no torchrun")
    if place is not None and place.size > 1:
        return InProcess(*join_torchrun(config, place))
    if config.ep == 1:
        config = rank_device(config, 0)
        return InProcess(config, LocalGroup(config.device))
    return OnRanks(config)


class InProcess:
    """This process is the only rank, or one of torchrun's, which all run the same program."""

    def __init__(self, config: EngineConfig, group: RankGroup) -> None:
        self._group = group
        self._engine = Engine(config, group)
        self.facts = self._engine.facts

    def run(self, submissions: list[Submission]) -> dict[Key, Ended]:
        """See `Backend`. Completions are dealt to the ranks by their own order, and every rank gets all results."""
        engine = self._engine
        mine = submissions[self._group.rank :: self._group.size]
        for submission in mine:
            engine.submit(submission)
        progress: list[Progress] = []
        rest_s, num_threads = 0.0, torch.get_num_threads()
        try:
            while not rest_s:
                advanced, rest_s = engine.step()
                progress += [progress_of(sequence) for sequence in advanced if sequence.finish_reason is not None]
        except BaseException:
            for submission in mine:
                engine.abort(submission.request_id)
            raise
        finally:
            torch.set_num_threads(num_threads)  # small steps run on one, and this process is the caller's
        return _by_key(_gather(progress, self._group))

    def statistics(self) -> list[dict[str, Any]]:
        """See `Backend`; under torchrun this rank's only."""
        return [self._engine.statistics()]

    def close(self) -> None:
        """See `Backend`."""
        self._engine.close()


class OnRanks:
    """The ranks are processes that belong to this one."""

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = RankProcesses()
        self.facts = self._ranks.start_group(config)
        self._size = config.ep

    def run(self, submissions: list[Submission]) -> dict[Key, Ended]:
        """See `Backend`. Each completion goes to the rank with the fewest tokens to run."""
        loads = [0] * self._size
        try:
            for submission in submissions:
                rank = loads.index(min(loads))
                loads[rank] += len(submission.prompt) + (submission.params.max_tokens or self.facts.max_model_len)
                self._ranks.send(rank, partial(_submit, submission))
            return _by_key(self._collect({(s.request_id, s.index) for s in submissions}))
        except MoelessError:
            self.close()
            raise
        except BaseException:  # an interrupt: the ranks stay for the next call
            for request_id in {s.request_id for s in submissions}:
                self._ranks.broadcast(partial(_abort, request_id))
            raise

    def _collect(self, wanted: set[Key]) -> list[Progress]:
        ended: list[Progress] = []
        while len(ended) < len(wanted):
            _, message = self._ranks.receive()
            if isinstance(message, Advanced):
                ended += [
                    p for p in message.progress if p.finish_reason is not None and (p.request_id, p.index) in wanted
                ]
        return ended

    def statistics(self) -> list[dict[str, Any]]:
        """See `Backend`."""
        self._ranks.tell_all(AskStatistics())
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self._size:
            rank, message = self._ranks.receive()
            if isinstance(message, Statistics):
                answers[rank] = message.values
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        """See `Backend`."""
        self._ranks.close()


def _submit(submission: Submission, number: int) -> Submit:
    return Submit(number, submission)


def _abort(request_id: str, number: int) -> Abort:
    return Abort(number, request_id)


def _by_key(progress: list[Progress]) -> dict[Key, Ended]:
    ended = {}
    for item in progress:
        assert item.output is not None, "only ended completions come here"
        scores = None if item.prompt_logprobs is None else tuple(item.prompt_logprobs)
        output = item.output
        if item.routed_experts is not None:
            output = replace(output, routed_experts=from_npy(item.routed_experts))
        ended[item.request_id, item.index] = Ended(output, scores)
    return ended


def _gather(progress: list[Progress], group: RankGroup) -> list[Progress]:
    """All ranks' items on every rank."""
    if group.size == 1:
        return progress
    blob = torch.frombuffer(bytearray(msgspec.msgpack.encode(progress)), dtype=torch.uint8)
    sizes = group.exchange(torch.tensor([len(blob)], dtype=torch.int64))[:, 0].tolist()
    rows = blob.repeat(group.size)[:, None].to(group.device)
    received = all_to_all(group, rows, [len(blob)] * group.size, sizes)
    parts = received[:, 0].cpu().split(sizes)
    return [item for part in parts for item in msgspec.msgpack.decode(part.numpy().tobytes(), type=list[Progress])]
