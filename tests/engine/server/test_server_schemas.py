"""What requests may hold: absent is null, wrong is refused by name, unimplemented is never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from moeless.engine.request import SamplingParams
from moeless.engine.server.errors import ApiError
from moeless.engine.server.sampling import refuse_unimplemented, sampling_params
from moeless.engine.server.schemas import ChatBody, CompletionBody, GenerationBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def params(body: GenerationBody, **defaults: float) -> SamplingParams:
    return sampling_params(body, defaults, vocab_size=100)


@pytest.mark.parametrize("body_class", [CompletionBody, ChatBody])
def test_every_optional_key_takes_null(body_class: type[GenerationBody]) -> None:
    required = {"prompt": "x"} if body_class is CompletionBody else CHAT
    nulls = {name: None for name in body_class.model_fields if name not in required}
    refuse_unimplemented(body := body_class.model_validate({**required, **nulls, "tools": None}))
    assert params(body) == params(body_class.model_validate(required))


def test_defaults() -> None:
    assert params(CompletionBody(prompt="x")).max_tokens == 16
    assert params(ChatBody.model_validate(CHAT)).max_tokens is None
    body = ChatBody.model_validate({**CHAT, "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0})
    assert params(body, temperature=0.6, top_p=0.9) == SamplingParams(max_tokens=7, temperature=0, top_p=0.9)
    echoed = params(CompletionBody(prompt="x", echo=True, logprobs=3))
    assert (echoed.logprobs, echoed.prompt_logprobs) == (3, 3)
    assert params(ChatBody.model_validate({**CHAT, "logprobs": True})).logprobs == 0


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1, 2], [3]]])
def test_all_kinds_of_prompts(prompt: Any) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**6),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", 2**40),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.1),
        ("seed", 2**70),
        ("stop", [""]),
        ("stop", ["x"] * 10_000),
        ("stop_token_ids", [-1]),
        ("logit_bias", {str(i): 0.0 for i in range(10_000)}),
        ("logit_bias", {"1": 1e9}),
        ("stream", "yes"),
        ("stream_options", []),
        ("prompt", "\ud800"),
        ("prompt", {"text": "x"}),
        ("prompt", [1, "x"]),
        ("prompt", [True]),
        ("logprobs", 1000),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        CompletionBody.model_validate({"prompt": "x", field: value})
    assert error.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("functions", [{}]),
        ("best_of", 3),
        ("suffix", "end"),
        ("use_beam_search", True),
        ("stream_options", {"include_usage": True}),  # without stream
    ],
)
def test_what_is_not_implemented_is_refused(field: str, value: Any) -> None:
    body = CompletionBody.model_validate({"prompt": "x", field: value})
    with pytest.raises(ApiError) as error:
        refuse_unimplemented(body)
    assert (error.value.status, error.value.param) == (400, field)


def test_harmless_forms_of_the_same_keys_pass() -> None:
    harmless = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "whatever": 3}
    refuse_unimplemented(CompletionBody.model_validate({"prompt": "x", **harmless}))


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"logit_bias": {"100": 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_values_out_of_the_models_range(values: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        params(CompletionBody.model_validate({"prompt": "x", **values}))
    assert (error.value.status, error.value.param) == (400, param)
