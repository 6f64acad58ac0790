"""Errors as OpenAI clients read them: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

log = logging.getLogger("moeless")

_TYPES = {401: "authentication_error", 500: "server_error", 503: "service_unavailable"}


class ApiError(Exception):
    """An answer other than 200. `param` names the field that is wrong, `code` is for programs to read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = (
            status,
            message,
            param,
            code,
            retry_after_s,
        )
        self.kind = kind or _TYPES.get(status, "invalid_request_error")


def internal_error() -> ApiError:
    """A bug, without any detail that is not a client's to know."""
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def error_value(error: ApiError) -> dict[str, Any]:
    """The body of the answer."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    """The answer. Escaped to ASCII, since a message may quote what is no valid text."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = json.dumps(error_value(error), allow_nan=False).encode()
    return Response(body, error.status, headers, "application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of `app` the same shape, the framework's own included."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """400 with the first field that is wrong; what the client sent is not repeated."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}"))
    path = [part for part in first["loc"] if part not in ("body", "query")]
    param = _param_of(path)
    message = first["msg"].removeprefix("Value error, ")
    return error_response(ApiError(400, f"{param}: {message}" if param else f"the body: {message}", param=param))


def _param_of(path: list[Any]) -> str | None:
    """`messages[0].content` for a place in the body; names of the alternatives that were tried are left out."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif str(part).isidentifier() and part not in ("str", "int", "float", "bool", "dict", "list"):
            text += f".{part}" if text else str(part)
    return text or None


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    response = error_response(ApiError(error.status_code, known.get(error.status_code, str(error.detail)), code=code))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    """500 without any detail; the log has the traceback."""
    return error_response(internal_error())
