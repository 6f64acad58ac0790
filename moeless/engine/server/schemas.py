"""What requests may hold, strictly typed: null means absent, unknown keys are let through, wrong types are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from moeless.engine.request import MAX_LOGPROBS

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_MAX_TOP_LOGPROBS = 20


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has a lone surrogate, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
StopText = Annotated[str, Field(min_length=1, max_length=1_024), AfterValidator(_whole_characters)]
Token = Annotated[int, Field(ge=0, le=_INT32)]


class Body(BaseModel):
    """Base of all."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = Field(default=None, max_length=1_024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=_INT32)
    min_tokens: int | None = Field(default=None, ge=0, le=_INT32)
    n: int | None = Field(default=None, ge=1, le=128)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e6)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=4_096)
    seed: int | None = Field(default=None, ge=-_INT64 - 1, le=_INT64)
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: list[Token] | None = Field(default=None, max_length=1_024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    user: str | None = None
    request_id: str | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Text | list[Token] | Annotated[list[Text], Field(max_length=2_048)] | list[list[Token]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=min(_MAX_TOP_LOGPROBS, MAX_LOGPROBS))
    best_of: int | None = None
    suffix: str | None = None


class Message(Body):
    role: str = Field(max_length=64)
    content: Text | list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=min(_MAX_TOP_LOGPROBS, MAX_LOGPROBS))
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class ScaleBody(Body):
    """`POST /scale`."""

    ep: int = Field(ge=1, le=1_024)


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Token]
