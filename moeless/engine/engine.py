"""One rank's half of the engine: its sequences, its share of the experts, and the lock-step with the other ranks.

Every step begins with one word to all ranks (`Control`). While any rank has tokens all take part in every MoE layer,
those without tokens with none; when no rank has, all of them sleep until their front end sends something or experts
have stayed long enough without a token. One rank alone does the same with a group of one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

from moeless.config.engine import EngineConfig
from moeless.engine.ep import Control, RankGroup
from moeless.engine.expert_layers import ExpertLayers, ExpertSettings, build_expert_layers
from moeless.engine.expert_pool import PoolStats
from moeless.engine.facts import model_facts
from moeless.engine.foresight import Predict, load_foresight
from moeless.engine.layer_tap import LayerTap
from moeless.engine.routed_experts import keep_routes, wants_routes
from moeless.engine.runner import ModelRunner
from moeless.engine.sampling import sequence_seed
from moeless.engine.scheduler import Chunk, Scheduler
from moeless.engine.sequence import Sequence
from moeless.engine.submission import Submission
from moeless.engine.text import TextStream
from moeless.engine.traffic import Traffic
from moeless.models.checkpoint import LoadedModel, load_model
from moeless.models.expert_store import ExpertSource
from moeless.models.small_products import hold_blas_to_one_thread, install_small_linears
from moeless.models.weights import load_skeleton
from moeless.models.whole_experts import install_whole_experts
from moeless.policy.cost import CostModel


class Engine:
    """See the module's head. `step` is called in a loop; nothing here waits but the group's collectives."""

    def __init__(self, config: EngineConfig, group: RankGroup | None = None) -> None:
        """Load the model, without its experts where they will be shared; `join` comes next, if no group is given.

        Raises:
            MoelessError: the checkpoint can't be used, or sizes do not fit.
        """
        self._config = config
        self._source: ExpertSource | None = None
        if config.runs_whole:
            loaded = load_model(config)
            install_whole_experts(loaded.layers)
        else:
            loaded, self._source = load_skeleton(config)
        install_small_linears(loaded.model, but=loaded.model.get_input_embeddings())
        if loaded.model.device.type == "cpu":
            hold_blas_to_one_thread()
        self.experts: ExpertLayers | None = None
        self._loaded, self._foresight = loaded, _foresight(config, loaded)
        self.runner = ModelRunner(loaded.model, config.kv_tokens)
        self._tap = LayerTap(loaded.layers) if config.runs_whole else None
        self.scheduler = self._new_scheduler()
        self.tokenizer = loaded.tokenizer
        self.facts = model_facts(config, loaded, self.runner.kv.allocator.max_extent)
        self.heard = 0
        """Number of the front end's last message that arrived here; see `Control`."""
        self.is_stopped = self.is_parting = False
        """Whether all ranks have agreed to end, or to leave the group for another one."""
        self._num_taken = 0
        self._num_steps = self._num_idle_steps = 0
        self._busy_s = 0.0
        if group is not None:
            self.join(group)

    def join(self, group: RankGroup, cost: CostModel | None = None) -> None:
        """Become a rank of `group`, with nothing to run. Experts in memory that the group wants here stay there.

        Args:
            cost: what an earlier group has measured, the same on all ranks; None: it is measured now.

        Raises:
            MoelessError: sizes do not fit a group of this size, an expert cannot be read, or another rank is lost.
        """
        self.group = group
        self.heard, self.is_parting = 0, False
        for sequence in self.scheduler.running:
            self.runner.kv.release(sequence.sequence_id)
        self.scheduler = self._new_scheduler()
        if self._source is not None:
            self.experts = self._build_experts(self._source, cost)
            self.experts.load_initial()

    @property
    def cost(self) -> CostModel | None:
        """What plans are priced with, once there was more than one rank to plan for."""
        return self.experts.cost if self.experts is not None and self.group.size > 1 else None

    def submit(self, submission: Submission) -> None:
        """Queue a completion. Its sizes are the front end's to check (`check_submission`)."""
        params = submission.params
        room = self.facts.max_model_len - len(submission.prompt)
        self.scheduler.add(
            Sequence(
                sequence_id=self._num_taken,
                request_id=submission.request_id,
                index=submission.index,
                params=params,
                prompt=tuple(submission.prompt),
                tokens=[*submission.prompt, *submission.made],
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                seed=sequence_seed(submission.seed, submission.index),
                eos_ids=frozenset(self.facts.eos_ids),
                text_stream=self._text_stream(params.skip_special_tokens),
                arrived_s=time.perf_counter(),
            )
        )
        self._num_taken += 1

    def abort(self, request_id: str) -> None:
        """Drop what is left of a request."""
        for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
            if sequence.request_id == request_id:
                self.scheduler.remove(sequence)

    def step(self, *, stop: bool = False, part: bool = False) -> tuple[list[Sequence], float]:
        """Agree with the other ranks, and run one step if any of them has work and none wants to `stop` or `part`.

        Returns:
            The sequences that got a token or ended, and how many seconds to sleep unless a message comes: 0 if any
            rank has work, or has not heard what others have. Infinite is until the next message.

        Raises:
            RankError: another rank did not take part in time.
        """
        now_us = time.monotonic_ns() // 1_000 if self.group.rank == 0 else 0
        word = self.group.control(
            Control(
                has_work=int(self.scheduler.has_work),
                stop=int(stop),
                part=int(part),
                time_us=now_us,
                heard=self.heard,
                least_heard=-self.heard,
            )
        )
        if word.stop or word.part:
            self.is_stopped, self.is_parting = bool(word.stop), bool(word.part)
            return [], 0.0
        if not word.has_work:
            rest_s = math.inf if self.experts is None else self.experts.rest(word.time_us)
            may_sleep = self.heard < word.heard or word.heard == -word.least_heard
            return [], rest_s if may_sleep else 0.0
        begin_s = time.perf_counter()
        chunks = self.scheduler.schedule()
        for sequence in (chunk.sequence for chunk in chunks):
            sequence.started_s = sequence.started_s or begin_s
        if self.experts is not None:
            self.experts.begin_step(word.time_us)
        advanced = self._run(chunks) if chunks else self._run_idle()
        self._end_step(chunks, time.perf_counter() - begin_s)
        return advanced, 0.0

    @property
    def traffic(self) -> Traffic:
        """Where tokens went."""
        if self._tap is not None:
            return self._tap.traffic
        assert self.experts is not None, "a rank without expert layers has a tap"
        return self.experts.controller.traffic

    def statistics(self) -> dict[str, Any]:
        """Plain numbers of this rank since its start."""
        kv = self.runner.kv
        return {
            "steps": self._num_steps,
            "idle_steps": self._num_idle_steps,
            "busy_s": self._busy_s,
            "tokens_run": self.runner.num_tokens_run,
            "preemptions": self.scheduler.num_preemptions,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_tokens": kv.allocator.num_rows,
            "kv_tokens_used": kv.allocator.num_used,
            "kv_tokens_peak": kv.peak_tokens,
            "kv_bytes": kv.num_bytes,
            "experts": None if self.experts is None else self.experts.metrics(),
        }

    def close(self) -> None:
        """Stop background work and leave the group; safe to call twice."""
        if self.experts is not None:
            self.experts.close()
        self.group.close()

    def _end_step(self, chunks: list[Chunk], duration_s: float) -> None:
        num_tokens = sum(chunk.num_new for chunk in chunks)
        if self.experts is not None:
            self.experts.end_step(_phase(chunks), num_tokens)
        if self._tap is not None:
            self._tap.flush()
            self._tap.traffic.end_iteration(phase=_phase(chunks), num_tokens=num_tokens, duration_s=duration_s)
        self._busy_s += duration_s
        self._num_steps += 1

    def _run(self, chunks: list[Chunk]) -> list[Sequence]:
        wants = wants_routes(chunks)
        if self.experts is not None:
            self.experts.step_ids.start(wanted=wants)
        advanced = self.runner.step(chunks, self._keep_routes if wants else None)
        for sequence in advanced:
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
        return advanced

    def _keep_routes(self, chunks: Rows[Chunk]) -> None:
        if self._tap is not None:
            ids = self._tap.step_ids()
        else:
            assert self.experts is not None, "a rank without expert layers has a tap"
            ids = self.experts.step_ids.stop()
        keep_routes(chunks, ids, self.facts.num_experts)

    def _run_idle(self) -> list[Sequence]:
        assert self.experts is not None, "one rank alone has no idle step"
        self.experts.idle_step()
        self._num_idle_steps += 1
        return []

    def _new_scheduler(self) -> Scheduler:
        config = self._config
        return Scheduler(self.runner.kv, max_batch_tokens=config.max_batch_tokens, max_seqs=config.max_seqs)

    def _build_experts(self, source: ExpertSource, cost: CostModel | None) -> ExpertLayers:
        """The expert layers for the group, over the pool of the group before if there is one."""
        config, num_slots = self._config, self._config.expert_slots
        pool = None if self.experts is None else self.experts.pool
        if pool is not None:
            pool.stats = PoolStats()  # counts are a group's own
        if num_slots is not None:  # a smaller group has no use for more
            num_slots = min(num_slots, source.num_experts * self.group.size)
        settings = ExpertSettings(
            balancer=config.balancer,
            cost=cost,
            num_slots=num_slots,
            budget_bytes=None if config.expert_memory_gb is None else round(config.expert_memory_gb * 1e9),
            distance=self._foresight[1],
            keep_alive_s=config.keep_alive,
            scale_to_zero=config.scale_to_zero,
            verify=config.verify,
        )
        model, layers = self._loaded.model, self._loaded.layers
        return build_expert_layers(
            model, layers, source, self.group, settings, predictors=self._foresight[0], pool=pool
        )

    def _text_stream(self, skip_special_tokens: bool) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(self.tokenizer, skip_special_tokens=skip_special_tokens)


def _foresight(config: EngineConfig, loaded: LoadedModel) -> tuple[list[Predict | None], int]:
    """Predictors by layer, and how far ahead they look."""
    if config.predictors is None:
        return [], 1
    return load_foresight(Path(config.predictors), loaded, config.distance)


def _phase(chunks: Rows[Chunk]) -> Any:
    single = {chunk.num_new == 1 for chunk in chunks}
    return "mixed" if len(single) == 2 else "prefill" if single == {False} else "decode"
