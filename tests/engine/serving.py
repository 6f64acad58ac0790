"""What the engine's tests share: sequences without a front end, and the tokens transformers itself gives."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from moeless.config.engine import EngineConfig
from moeless.engine.engine import Engine
from moeless.engine.ep import RankGroup
from moeless.engine.expert_layers import ExpertSettings
from moeless.engine.request import CompletionOutput, SamplingParams
from moeless.engine.sequence import Sequence
from moeless.engine.submission import Submission
from moeless.engine.text import TextStream
from tests.engine.work import RandomBalancer


def make_sequence(
    sequence_id: int,
    prompt: Rows[int],
    params: SamplingParams,
    *,
    tokenizer: Any = None,
    eos_ids: Rows[int] = (),
    made: Rows[int] = (),
) -> Sequence:
    """A sequence as the engine makes it."""
    return Sequence(
        sequence_id=sequence_id,
        request_id=str(sequence_id),
        index=0,
        params=params,
        prompt=tuple(prompt),
        tokens=[*prompt, *made],
        max_tokens=16 if params.max_tokens is None else params.max_tokens,
        seed=params.seed or 0,
        eos_ids=frozenset(eos_ids),
        text_stream=TextStream(tokenizer) if tokenizer is not None else None,
    )


def random_prompts(lengths: Rows[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    """Token ids that avoid the special ones of `tiny`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy_reference(model: PreTrainedModel, prompts: Rows[list[int]], num_tokens: int) -> list[list[int]]:
    """`generate`, one prompt at a time."""
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = [model.generate(torch.tensor([p]), generation_config=config) for p in prompts]
    return [o[0, len(p) :].tolist() for o, p in zip(outputs, prompts, strict=True)]


def near_tie(model: PreTrainedModel, prompt: Rows[int], ours: Rows[int], theirs: Rows[int]) -> bool:
    """Whether two outputs part at a step where the model's top two logits are within 1e-5 of each other.

    Another batch shape may round such a step the other way. `model` must still have its own attention.
    """
    step = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *theirs[:step]]])).logits[0, -1]
    return {ours[step], theirs[step]} == set(logits.topk(2).indices.tolist()) and bool(
        (logits[ours[step]] - logits[theirs[step]]).abs() <= 1e-5
    )


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def run_engine(
    group: RankGroup,
    *,
    config: dict[str, Any],
    prompts: Rows[list[int]],
    params: Rows[SamplingParams],
    owners: Rows[int],
    starts: Rows[int],
    random_plans: bool = False,
) -> tuple[dict[int, CompletionOutput], dict[str, Any]]:
    """One rank of an engine: prompt i runs on rank owners[i] and arrives before step starts[i].

    With `random_plans` experts change places in every step, wherever chance puts them.

    Returns:
        This rank's completions by prompt, and its statistics.
    """
    engine = Engine(EngineConfig(ep=group.size, **config), group)
    if random_plans and engine.experts is not None:
        controller = engine.experts.controller
        shape = ExpertSettings().shape(controller.num_experts, group.size)
        controller._balancer = RandomBalancer(shape, seed=3)
    done: dict[int, CompletionOutput] = {}
    step, rest_s = 0, 0.0
    while not rest_s or step <= max(starts):
        for i in range(len(prompts)):
            if owners[i] == group.rank and starts[i] == step:
                engine.submit(Submission(request_id=str(i), index=0, prompt=prompts[i], params=params[i], seed=i))
        advanced, rest_s = engine.step()
        done |= {int(s.request_id): s.output() for s in advanced if s.finish_reason is not None}
        step += 1
    statistics = engine.statistics()
    engine.close()
    return done, statistics
