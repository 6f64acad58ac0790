"""The routes."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from starlette.responses import Response

import moeless
from moeless.engine.server import admin
from moeless.engine.server.chat import answer_chat
from moeless.engine.server.completions import answer_completion
from moeless.engine.server.errors import install_error_handlers
from moeless.engine.server.schemas import ChatBody, CompletionBody, DetokenizeBody, ScaleBody, TokenizeBody
from moeless.engine.server.service import Service


def make_app(service: Service) -> FastAPI:
    """The application, for `Guard` to stand before."""
    app = FastAPI(title="moeless", version=moeless.__version__, redoc_url=None)
    install_error_handlers(app)
    _add_generation(app, service)
    _add_admin(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await answer_chat(service, request, body)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await answer_completion(service, request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return admin.models(service)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return admin.model(service, name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        return await admin.tokenize(service, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        return await admin.detokenize(service, body)


def _add_admin(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        return admin.health(service)

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        return admin.ready(service)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return admin.version()

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return await admin.metrics(service)

    @app.post("/scale")
    async def scale(body: ScaleBody) -> dict[str, Any]:
        return await admin.scale(service, body)

    @app.post("/{action}_expert_distribution_record")
    async def record(action: Literal["start", "stop", "dump"]) -> dict[str, Any]:
        return await admin.record(service, action)
