"""`LLM`: the engine for offline use from Python, in the manner of vLLM's class of that name."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from moeless.config.engine import EngineConfig
from moeless.engine.backends import Backend, make_backend
from moeless.engine.request import RequestOutput, SamplingParams
from moeless.engine.submission import Submission, check_routed_experts, check_submission
from moeless.errors import UsageError
from moeless.models.checkpoint import load_tokenizer

Prompt = str | Sequence[int]
Chat = Sequence[Mapping[str, Any]]


class LLM:
    """A model on one or more ranks.

    `LLM("checkpoints/demo-moe", ep=2).generate(["Hello"], SamplingParams(max_tokens=32))`

    With `ep` above 1 the ranks are processes of this host. Under torchrun every process makes an `LLM` of its own with
    the same arguments and calls the same methods; each gets all outputs.
    """

    def __init__(
        self,
        model: str,
        predictors: str | None = None,
        *,
        ep: int = 1,
        balancer: str = "moeless-roofline",
        **options: Any,
    ) -> None:
        """Load `model`.

        Args:
            options: further fields of `EngineConfig`, such as `max_model_len` or `kv_tokens`.

        Raises:
            MoelessError: the checkpoint can't be used, sizes do not fit, or a rank failed.
        """
        self.config = EngineConfig(model=model, predictors=predictors, ep=ep, balancer=balancer, **options)  # type: ignore[arg-type]
        self._tokenizer = load_tokenizer(self.config)
        self._backend: Backend = make_backend(self.config, os.environ)
        self._finalizer = weakref.finalize(self, self._backend.close)
        self._num_requests = 0
        self._totals = {"requests": 0, "prompt_tokens": 0, "generation_tokens": 0, "generate_s": 0.0}

    def default_params(self) -> SamplingParams:
        """What the checkpoint's generation configuration recommends."""
        return SamplingParams(**self._backend.facts.sampling_defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); outputs are in the order of the prompts.

        Raises:
            UsageError: a prompt or parameter that can't work; nothing has run then.
            RankError: a rank failed.
        """
        listed = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        ids = [self._encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in listed]
        return self._run(ids, texts, params)

    def chat(
        self,
        conversations: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, laid out by the checkpoint's chat template.

        Raises:
            UsageError: see `generate`; also a checkpoint without a chat template.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
            raise UsageError(f"{self.config.model!r} has no chat template; use generate")
        listed: list[Any] = list(conversations)
        if listed and isinstance(listed[0], Mapping):
            listed = [listed]
        texts = [
            tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(chat_template_kwargs or {}),
            )
            for messages in listed
        ]
        return self._run([self._encode(text, add_special_tokens=False) for text in texts], list(texts), params)

    def statistics(self) -> dict[str, Any]:
        """Measured numbers since the start: totals here, and each rank's own (`Engine.statistics`)."""
        seconds = self._totals["generate_s"]
        rate = self._totals["generation_tokens"] / seconds if seconds else 0.0
        return {
            "source": "live",
            **self._totals,
            "generation_tokens_per_s": rate,
            "ranks": self._backend.statistics(),
        }

    def close(self) -> None:
        """End the ranks; safe to call twice. Also happens when the object goes or the program ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise UsageError(f"{self.config.model!r} has no tokenizer; give token ids, or --tokenizer")
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = self.default_params() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(each)} sampling parameters were given for {len(prompts)} prompts")
        facts = self._backend.facts
        for ids, chosen in zip(prompts, each, strict=True):
            check_submission(
                ids,
                chosen,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                has_tokenizer=self._tokenizer is not None,
            )
            check_routed_experts([ids], chosen, facts)
        names = [str(self._num_requests + i) for i in range(len(prompts))]
        self._num_requests += len(prompts)
        begin_s = time.perf_counter()
        ended = self._backend.run(
            [
                Submission(request_id=name, index=index, prompt=ids, params=chosen, seed=seed)
                for name, ids, chosen, seed in zip(names, prompts, each, map(_seed_of, each), strict=True)
                for index in range(chosen.n)
            ]
        )
        outputs = [
            RequestOutput(
                request_id=name,
                prompt=text,
                prompt_token_ids=tuple(ids),
                outputs=tuple(ended[name, index].output for index in range(chosen.n)),
                prompt_logprobs=ended[name, 0].prompt_logprobs,
            )
            for name, text, ids, chosen in zip(names, texts, prompts, each, strict=True)
        ]
        self._count(outputs, time.perf_counter() - begin_s)
        return outputs

    def _count(self, outputs: list[RequestOutput], seconds: float) -> None:
        self._totals["requests"] += len(outputs)
        self._totals["prompt_tokens"] += sum(len(o.prompt_token_ids) for o in outputs)
        self._totals["generation_tokens"] += sum(len(c.token_ids) for o in outputs for c in o.outputs)
        self._totals["generate_s"] += seconds


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _seed_of(params: SamplingParams) -> int:
    return secrets.randbits(63) if params.seed is None else params.seed
