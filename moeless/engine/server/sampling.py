"""From a request's body to `SamplingParams`, refusing what is not implemented instead of ignoring it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeless.engine.request import SamplingParams
from moeless.engine.server.errors import ApiError
from moeless.engine.server.schemas import REFUSED, ChatBody, CompletionBody, GenerationBody
from moeless.errors import UsageError

_SAMPLING = {"min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"}
_SAMPLING |= {"repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"}
_SAMPLING |= {"skip_special_tokens", "return_routed_experts"}


def refuse_unimplemented(body: GenerationBody) -> None:
    """Raises `ApiError` 400 that names the first key whose effect the client would miss."""
    given = {**(body.model_extra or {}), "suffix": getattr(body, "suffix", None)}
    for name, harmless in REFUSED.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of is not supported", param="best_of", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def sampling_params(body: GenerationBody, defaults: Mapping[str, float], vocab_size: int) -> SamplingParams:
    """The body's parameters; what is absent comes from the checkpoint's `defaults`.

    Raises:
        ApiError: 400, naming the field.
    """
    values: dict[str, Any] = {**defaults}
    values.update({name: value for name in _SAMPLING if (value := getattr(body, name)) is not None})
    values["logit_bias"] = _logit_bias(body)
    values |= _chat_values(body) if isinstance(body, ChatBody) else _completion_values(body)
    try:
        params = SamplingParams(**values)
        params.check_vocabulary(vocab_size)
    except UsageError as error:
        raise usage_error(error) from None
    return params


def usage_error(error: UsageError) -> ApiError:
    """400; our messages begin with the field that is wrong."""
    first = str(error).split(maxsplit=1)[0].rstrip(":")
    is_field = first in GenerationBody.model_fields or first in ("logprobs", "prompt_logprobs")
    return ApiError(400, str(error), param=first if is_field else None)


def _chat_values(body: ChatBody) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return {"max_tokens": given, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}


def _completion_values(body: GenerationBody) -> dict[str, Any]:
    assert isinstance(body, CompletionBody)
    return {
        "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
    }


def _logit_bias(body: GenerationBody) -> dict[int, float] | None:
    if not body.logit_bias:
        return None
    bad = next((key for key in body.logit_bias if not (key.isascii() and key.isdecimal() and len(key) < 10)), None)
    if bad is not None:
        raise ApiError(400, "logit_bias: keys must be token ids", param="logit_bias")
    return {int(key): bias for key, bias in body.logit_bias.items()}
