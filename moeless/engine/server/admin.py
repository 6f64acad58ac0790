"""Endpoints about the server itself: health, metrics, the tokenizer, and the record of expert loads."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import JSONResponse, Response

import moeless
from moeless.engine.messages import Record
from moeless.engine.server.errors import ApiError
from moeless.engine.server.logprobs import token_text
from moeless.engine.server.schemas import DetokenizeBody, ScaleBody, TokenizeBody
from moeless.engine.server.service import Service
from moeless.errors import CapacityError, RankError

_RETRY_S = 5


def health(service: Service) -> Response:
    """200 when every rank has given a sign of life lately. Raises `ApiError` 503."""
    if (problem := service.front.problem()) is not None:
        code = {"loading": "loading", "failed": "engine_dead"}.get(service.front.state, "rescaling")
        raise ApiError(503, problem, code=code, retry_after_s=_RETRY_S)
    return JSONResponse({"status": "ok", "ranks": service.front.num_ranks})


def ready(service: Service) -> Response:
    """200 when requests are taken in and run at once. Raises `ApiError` 503."""
    if service.front.state == "draining":
        raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=_RETRY_S)
    return health(service)


async def metrics(service: Service) -> Response:
    """Prometheus' text format."""
    await service.front.refresh()
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def version() -> dict[str, str]:
    """The program's version."""
    return {"version": moeless.__version__}


def models(service: Service) -> dict[str, Any]:
    """All names of the model."""
    return {"object": "list", "data": [_model(service, name) for name in service.config.model_names]}


def model(service: Service, name: str) -> dict[str, Any]:
    """One name of the model. Raises `ApiError` 404."""
    service.require_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = service.front.facts
    return {
        "id": name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "moeless",
        "root": service.config.model,
        "parent": None,
        "max_model_len": None if facts is None else facts.max_model_len,
    }


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a text, or of messages under the chat template. Raises `ApiError`."""
    prompts, facts = service.require_ready(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.prompt is None:
        ids = await prompts.of_chat(body)
    else:
        ids = await prompts.encode(body.prompt, body.add_special_tokens is not False, "prompt")
    names = [token_text(prompts.tokenizer, token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids, "token_strs": names}


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids. Raises `ApiError`."""
    prompts, facts = service.require_ready(body.model)
    bad = next((token for token in body.tokens if token >= facts.vocab_size), None)
    if bad is not None:
        raise ApiError(400, f"token id {bad} is outside the vocabulary of {facts.vocab_size}", param="tokens")
    return {"prompt": await prompts.decode(body.tokens)}


async def scale(service: Service, body: ScaleBody) -> dict[str, Any]:
    """Have another number of ranks; answers when they work. Requests go on meanwhile.

    Raises:
        ApiError: 409 when there is no room for so many or another change is under way; 503 when it failed.
    """
    service.require_ready(None)
    begin_s = time.monotonic()
    try:
        await service.front.scale(body.ep)
    except CapacityError as error:
        raise ApiError(409, str(error), param="ep", code="cannot_scale") from None
    except RankError as error:
        raise ApiError(503, str(error), param="ep", code="rescaling", retry_after_s=_RETRY_S) from None
    return {"status": "ok", "ep": body.ep, "seconds": round(time.monotonic() - begin_s, 3)}


async def record(service: Service, action: str) -> dict[str, Any]:
    """Start or stop the record of expert loads, or write it to a file of `--record-dir`.

    Raises:
        ApiError: 409 when there is nothing to stop or write, or a record runs already; 503 without ranks.
    """
    service.require_ready(None)
    path = service.config.record_dir / f"expert-distribution-{time.strftime('%Y%m%d-%H%M%S')}.safetensors"
    messages = {
        "start": Record("start", budget_bytes=service.config.record_mb * 1e6),
        "stop": Record("stop"),
        "dump": Record("dump", path=str(path.absolute())),
    }
    try:
        done = await service.front.record(messages[action])
    except CapacityError as error:
        raise ApiError(409, str(error), code="busy") from None
    except RankError as error:
        raise ApiError(503, str(error), code="rescaling", retry_after_s=_RETRY_S) from None
    if done.error:
        raise ApiError(409, done.error, code="no_record")
    answer: dict[str, Any] = {"status": "ok", "action": action, "num_steps": done.num_steps}
    return {**answer, "path": str(path)} if action == "dump" else answer
