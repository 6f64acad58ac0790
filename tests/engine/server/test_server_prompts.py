"""From what clients send to token ids."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from moeless.engine.server.prompts import Prompts
from moeless.engine.server.schemas import ChatBody, CompletionBody, TokenizeBody
from tests.engine.server.running import RunningServer

LONG = "One two three four. " * 500  # over the 2,048 tokens that the tokenizer says it takes


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Any:
    handler, logger = _Kept(), logging.getLogger("transformers")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


def test_a_text_over_the_tokenizers_length_is_no_warning(demo_model: Path, logged: list[logging.LogRecord]) -> None:
    """It warns once in its life, so each call has a tokenizer of its own; the last shows that it would."""
    message = {"role": "user", "content": LONG}
    calls = [
        lambda prompts: prompts.encode(LONG, True, "prompt"),
        lambda prompts: prompts.of_completion(CompletionBody.model_validate({"prompt": [LONG, "x"]})),
        lambda prompts: prompts.of_chat(ChatBody.model_validate({"messages": [message]})),
        lambda prompts: prompts.of_chat(TokenizeBody.model_validate({"messages": [message]})),
    ]
    for call in calls:
        prompts = Prompts(AutoTokenizer.from_pretrained(demo_model), 100_000)
        found: Any = asyncio.run(call(prompts))
        assert len(found[0] if isinstance(found[0], list) else found) > 2_048
        prompts.close()
    assert not logged
    AutoTokenizer.from_pretrained(demo_model)(LONG)
    assert "longer than the specified maximum" in logged[0].getMessage()


def test_the_servers_log_has_none_either(server: RunningServer, client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": LONG}).json()["count"] > 2_048
    assert client.post("/tokenize", json={"messages": [{"role": "user", "content": LONG}]}).json()["count"] > 2_048
    refused = client.post("/v1/completions", json={"prompt": LONG})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "longer than the specified maximum" not in server.log
