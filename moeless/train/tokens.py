"""Documents to token ids: chat template where there is one, cut to length, in a seeded order, up to a budget."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jinja2

from moeless.errors import CheckpointError, DataError
from moeless.train.data import Corpus, Document, Message

_MIN_DOCUMENT_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDocument:
    """Token ids of one document; the unit of packing and of the train/held-out split."""

    index: int
    """Position in the corpus: names the document wherever it goes."""
    ids: tuple[int, ...]
    """The whole document, cut to the longest length allowed."""
    prompt_ids: tuple[int, ...]
    """What the model would be asked to go on from: all up to the first answer, or the text itself."""


def tokenize_corpus(
    corpus: Corpus, tokenizer: Any | None, *, max_tokens: int, max_length: int, vocab_size: int, seed: int
) -> list[TokenDocument]:
    """Documents in a seeded random order until `max_tokens` tokens are there.

    Raises:
        CheckpointError: text needs a tokenizer and the checkpoint has none.
        DataError: nothing is left after tokenization, or a given token id lies outside the vocabulary.
    """
    order = list(range(len(corpus.documents)))
    random.Random(seed).shuffle(order)
    documents: list[TokenDocument] = []
    num_tokens = 0
    for index in order:
        ids, prompt_ids = _encode(corpus.documents[index], tokenizer, max_length)
        if ids and max(ids) >= vocab_size:
            raise DataError(f"token id {max(ids)} in {corpus.name!r} is outside the model's vocabulary of {vocab_size}")
        ids = ids[: min(max_length, max_tokens - num_tokens)]
        if len(ids) < _MIN_DOCUMENT_TOKENS:
            continue
        documents.append(TokenDocument(index=index, ids=tuple(ids), prompt_ids=tuple(prompt_ids)))
        num_tokens += len(ids)
        if num_tokens >= max_tokens - _MIN_DOCUMENT_TOKENS:
            break
    if not documents:
        raise DataError(f"no document of {corpus.name!r} has {_MIN_DOCUMENT_TOKENS} tokens or more")
    return documents


def documents_hash(documents: Iterable[TokenDocument]) -> str:
    """sha256 of all token ids and prompts in order: tells one tokenized corpus from another."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(repr((document.index, document.ids, document.prompt_ids)).encode())
    return digest.hexdigest()


def _encode(document: Document, tokenizer: Any | None, max_length: int) -> tuple[list[int], list[int]]:
    """Ids of the whole document and of its prompt."""
    if document.token_ids is not None:
        return document.token_ids, document.token_ids
    if tokenizer is None:
        raise CheckpointError(
            "the checkpoint has no tokenizer, so text cannot be read; give --tokenizer FOLDER or rows with token_ids"
        )
    if document.messages is None:
        # What cannot be used is cut before the tokenizer sees it: no tokenizer averages 32 characters a token.
        ids = tokenizer((document.text or "")[: 32 * max_length], truncation=False, verbose=False)["input_ids"]
        return ids, ids
    first_answer = next((i for i, m in enumerate(document.messages) if i and m["role"] == "assistant"), None)
    prompt = document.messages[: first_answer or len(document.messages)]
    return _encode_messages(document.messages, tokenizer, False), _encode_messages(prompt, tokenizer, True)


def _encode_messages(messages: list[Message], tokenizer: Any, add_generation_prompt: bool) -> list[int]:
    """Through the chat template; without one, or where a strict one refuses the roles, the bare contents."""
    if getattr(tokenizer, "chat_template", None) is not None:
        try:
            return tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=add_generation_prompt,
                tokenizer_kwargs={"verbose": False},
            )["input_ids"]
        except (jinja2.TemplateError, TypeError, ValueError):
            pass
    return tokenizer("\n\n".join(m["content"] for m in messages), verbose=False)["input_ids"]
