"""What requests may hold, strictly typed: null means absent, unknown keys are let through, wrong types are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moeless.engine.request import MAX_LOGPROBS

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_MAX_TOP_LOGPROBS = 20
_MAX_IDS, _MAX_PROMPTS, _MAX_MESSAGES, _MAX_PARTS = 2**20, 2_048, 10_000, 1_000
_MAX_STOPS, _MAX_STOP_CHARACTERS = 32, 256  # every token is compared with all beginnings of all of them

# Keys that would change the answer if they were implemented, with values that do not.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "documents": ([],),
    "chat_template": (),
    "suffix": ("",),
    "kv_transfer_params": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "length_penalty": (1, 1.0),
}


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has a lone surrogate, which is no character") from None
    return text


def _at_most(most: int) -> BeforeValidator:
    """Refuse a long list or object by its length, before the time it takes to look at what is in it."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"has {len(value)} items, at most {most} are allowed")
        return value

    return BeforeValidator(check)


def _few_prompts(value: Any) -> Any:
    """The same for a prompt: a list of ids, or of prompts."""
    if isinstance(value, list) and value:
        is_ids = isinstance(value[0], int)
        num_ids = len(value) if is_ids else sum(len(one) for one in value if isinstance(one, list))
        if num_ids > _MAX_IDS:
            raise ValueError(f"has {num_ids} token ids, at most {_MAX_IDS} are allowed")
        if not is_ids and len(value) > _MAX_PROMPTS:
            raise ValueError(f"has {len(value)} prompts, at most {_MAX_PROMPTS} are allowed")
    return value


def _only_text(value: Any) -> Any:
    """Content parts without the keys that nobody reads."""
    for part in value if isinstance(value, list) else ():
        if isinstance(part, dict):
            for key in set(part) - {"type", "text"}:
                del part[key]
    return value


Text = Annotated[str, AfterValidator(_whole_characters)]
StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS), AfterValidator(_whole_characters)]
Token = Annotated[int, Field(ge=0, le=_INT32)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Prompt = Text | Tokens | Annotated[list[Text], Field(fail_fast=True)] | Annotated[list[Tokens], Field(fail_fast=True)]


class Body(BaseModel):
    """Base of all."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    kept: ClassVar[frozenset[str]] = frozenset()
    """Keys that are no fields and are looked at all the same."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, values: Any) -> Any:
        """Free what nobody reads, in place: parsed, it may take many times the memory of the body it came in."""
        if isinstance(values, dict):
            for key in [key for key in values if key not in cls.model_fields and key not in cls.kept]:
                del values[key]
        return values


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and completions share."""

    kept = frozenset(REFUSED)

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
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, _at_most(4_096)] = None
    seed: int | None = Field(default=None, ge=-_INT64 - 1, le=_INT64)
    stop: Annotated[StopText | list[StopText] | None, _at_most(_MAX_STOPS)] = None
    stop_token_ids: Annotated[list[Token] | None, _at_most(1_024)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_routed_experts: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    user: str | None = None
    request_id: str | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, BeforeValidator(_few_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=min(_MAX_TOP_LOGPROBS, MAX_LOGPROBS))
    best_of: int | None = None
    suffix: str | None = None


class Message(Body):
    kept = frozenset({"tool_calls"})

    role: str = Field(max_length=64)
    content: Annotated[Text | list[dict[str, Any]] | None, BeforeValidator(_only_text), _at_most(_MAX_PARTS)] = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), _at_most(_MAX_MESSAGES)]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
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
    messages: Messages | None = None
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
    tokens: Annotated[Tokens, _at_most(_MAX_IDS)]
