"""`return_routed_experts` over real HTTP: base64 of an .npy file, once for each choice, streamed or not."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moeless.engine.routed_experts import from_npy
from tests.engine.routed import check_routes
from tests.engine.server.running import MODEL, events
from tests.engine.serving import random_prompts

TOKEN, NUM_TOKENS = 300, 6
# a bias that no logit outweighs: which tokens come out is known
ASKED: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": NUM_TOKENS,
    "logit_bias": {str(TOKEN): 100},
    "return_routed_experts": True,
}
CHAT = {"messages": [{"role": "user", "content": "Name three colours."}]}
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


def check(demo: PreTrainedModel, prompt: list[int], choice: dict[str, Any]) -> None:
    routes_TLK = from_npy(b64decode(choice["routed_experts"], validate=True))
    check_routes(demo, prompt + [TOKEN] * (NUM_TOKENS - 1), routes_TLK)


def body_and_prompt(client: httpx.Client, path: str) -> tuple[dict[str, Any], list[int]]:
    if path == PATHS[1]:
        return {**ASKED, **CHAT}, client.post("/tokenize", json=CHAT).json()["tokens"]
    prompt = random_prompts((40,), 4096)[0]
    return {**ASKED, "prompt": prompt}, prompt


@pytest.mark.parametrize("path", PATHS)
def test_whole_and_streamed(client: httpx.Client, demo: PreTrainedModel, path: str) -> None:
    body, prompt = body_and_prompt(client, path)
    answer = client.post(path, json={**body, "n": 2}).json()
    assert answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    for choice in answer["choices"]:
        check(demo, prompt, choice)
    with client.stream("POST", path, json={**body, "n": 2, "stream": True}) as response:
        streamed = [event["choices"][0] for event in events(response)]
    told = [choice for choice in streamed if "routed_experts" in choice]
    assert sorted(choice["index"] for choice in told) == [0, 1]
    for choice in told:
        assert choice["finish_reason"] == "length"
        check(demo, prompt, choice)


def test_several_prompts_have_their_own(client: httpx.Client, demo: PreTrainedModel) -> None:
    prompts = random_prompts((3, 17), 4096)
    answer = client.post(PATHS[0], json={**ASKED, "prompt": prompts}).json()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        check(demo, prompt, choice)


@pytest.mark.parametrize("value", [False, None])
@pytest.mark.parametrize("path", PATHS)
def test_nobody_gets_what_was_not_asked_for(client: httpx.Client, path: str, value: bool | None) -> None:
    body = {**body_and_prompt(client, path)[0], "return_routed_experts": value}
    assert "routed_experts" not in client.post(path, json=body).json()["choices"][0]


def test_an_echo_alone_has_the_prompts(client: httpx.Client, demo: PreTrainedModel) -> None:
    prompt = random_prompts((12,), 4096)[0]
    answer = client.post(PATHS[0], json={**ASKED, "prompt": prompt, "echo": True, "max_tokens": 0}).json()
    routes_TLK = from_npy(b64decode(answer["choices"][0]["routed_experts"]))
    check_routes(demo, prompt, routes_TLK)
    assert routes_TLK.dtype == np.uint8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": [[5]] * 6, "n": 128, "max_tokens": 2_000}, "would take up to"),
        ({"prompt": [5], "return_routed_experts": "yes"}, "return_routed_experts"),
    ],
)
def test_refusals_name_it(client: httpx.Client, changes: dict[str, Any], says: str) -> None:
    response = client.post(PATHS[0], json={**ASKED, **changes})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "return_routed_experts"
    assert says in error["message"]
