"""From what clients send to token ids, off the event loop: tokenizing and templates take time that streams need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2 import TemplateError

from moeless.engine.server.errors import ApiError
from moeless.engine.server.schemas import ChatBody, CompletionBody, Message, TokenizeBody

_Result = TypeVar("_Result")

# What the template's caller may not set: these are arguments of transformers' own function.
_TEMPLATE_ARGUMENTS = {"chat_template", "conversation", "tools", "documents", "tokenize", "padding", "truncation"}
_TEMPLATE_ARGUMENTS |= {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
_TEMPLATE_ARGUMENTS |= {"tokenizer_kwargs", "add_generation_prompt", "continue_final_message"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Prompts:
    """A tokenizer with its chat template, and the context length it works for."""

    def __init__(self, tokenizer: Any | None, max_model_len: int) -> None:
        self.tokenizer, self._max_model_len = tokenizer, max_model_len
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
        self._max_characters = max_model_len * longest
        """A text longer than this is over the context length without any need to tokenize it."""

    async def of_completion(self, body: CompletionBody) -> list[list[int]]:
        """The prompts of a completions request, one list of ids each.

        Raises:
            ApiError: 400.
        """
        prompt: Any = body.prompt
        listed = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not listed:
            raise ApiError(400, "prompt is empty", param="prompt")
        special = body.add_special_tokens is not False
        ids = [await self.encode(p, special, "prompt") if isinstance(p, str) else list(p) for p in listed]
        return [one[-(body.truncate_prompt_tokens or 0) :] for one in ids]

    async def of_chat(self, body: ChatBody | TokenizeBody) -> list[int]:
        """A conversation laid out by the chat template.

        Raises:
            ApiError: 400, also when there is no template or it refuses the conversation.
        """
        tokenizer = self._require_tokenizer()
        if getattr(tokenizer, "chat_template", None) is None:
            raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
        messages = [_plain(message, f"messages[{i}]") for i, message in enumerate(body.messages or ())]
        extra = body.chat_template_kwargs or {}
        if taken := sorted(_TEMPLATE_ARGUMENTS & set(extra)):
            raise ApiError(400, f"chat_template_kwargs must not have {taken[0]}", param="chat_template_kwargs")
        if sum(len(message["content"]) for message in messages) > self._max_characters:
            raise self._too_long("messages")
        begins = body.add_generation_prompt is not False and not body.continue_final_message

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=begins,
                continue_final_message=bool(body.continue_final_message),
                **extra,
            )
            return _ids(tokenizer, text, bool(body.add_special_tokens))

        try:
            ids = await self._elsewhere(render)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ApiError(400, f"the chat template refuses the messages: {error}", param="messages") from None
        keep = getattr(body, "truncate_prompt_tokens", None) or 0
        return ids[-keep:]

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """A text's token ids. Raises `ApiError` 400."""
        tokenizer = self._require_tokenizer()
        if len(text) > self._max_characters:
            raise self._too_long(param)
        return await self._elsewhere(lambda: _ids(tokenizer, text, add_special_tokens))

    async def decode(self, ids: Sequence[int]) -> str:
        """A text from token ids. Raises `ApiError` 400 without a tokenizer."""
        tokenizer = self._require_tokenizer()
        text: str = await self._elsewhere(lambda: tokenizer.decode(list(ids)))
        return text

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _elsewhere(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; send token ids to /v1/completions", param="prompt")
        return self.tokenizer

    def _too_long(self, param: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self._max_model_len} tokens. However, the {param} have more "
            f"than {self._max_characters} characters, which no tokenization fits into it",
            param=param,
            code="context_length_exceeded",
        )


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """A text's ids, without transformers' warning of a long one: what is too long is not the tokenizer's to say."""
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def _plain(message: Message, place: str) -> dict[str, str]:
    """A message as templates want it: a known role, and text."""
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"{place}.role must be one of {known}", param=f"{place}.role")
    if (message.model_extra or {}).get("tool_calls"):
        param = f"{place}.tool_calls"
        raise ApiError(400, "tool calls are not supported", param=param, code="unsupported_parameter")
    if message.content is None or isinstance(message.content, str):
        return {"role": role, "content": message.content or ""}
    texts = [_text_of(part, f"{place}.content[{i}]") for i, part in enumerate(message.content)]
    return {"role": role, "content": "\n".join(texts)}


def _text_of(part: dict[str, Any], place: str) -> str:
    """The text of a content part. Nothing is ever fetched: parts that point elsewhere are refused."""
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise ApiError(400, "only text content is supported", param=place, code="unsupported_content")
    if not isinstance(text, str):
        raise ApiError(400, f"{place}.text must be a string", param=f"{place}.text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{place}.text has a lone surrogate", param=f"{place}.text") from None
    return text
