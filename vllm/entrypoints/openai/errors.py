# SPDX-License-Identifier: Apache-2.0
"""Every error as an error object, OpenAI's or the route's own, from one mapping of exceptions."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.anthropic import errors as anthropic_errors
from vllm.entrypoints.openai.asgi import route_path
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import (
    EngineDeadError,
    EngineGenerateError,
    EngineSleepingError,
)

logger = init_logger(__name__)

#: what the client is told when the cause is ours; the cause itself goes to the log
_INTERNAL = "Internal server error; the server's log has the cause"


class APIError(Exception):
    """An error with its HTTP status and OpenAI error type; raised, or answered as it is."""

    def __init__(self, status: int, type_: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type_
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self, headers: dict[str, str] | None = None) -> Response:
        return ErrorResponse(self, headers)


class ModelNotFoundError(APIError):
    """The request names a model that is not served."""

    def __init__(self, name: str) -> None:
        message = f"The model `{name}` does not exist."
        super().__init__(HTTPStatus.NOT_FOUND, "NotFoundError", message, "model")


class ErrorResponse(Response):
    """An error in the form that the clients of the request's route know."""

    media_type = "application/json"

    def __init__(self, error: APIError, headers: dict[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(error.body()), error.status, headers)
        self._error = error
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) + "/"
        if scope["type"] != "http" or not path.startswith(anthropic_errors.PATH + "/"):
            await super().__call__(scope, receive, send)
            return
        error = self._error
        body = anthropic_errors.error_body(error.status, error.message, error.param)
        reply = Response(
            msgspec.json.encode(body), error.status, self._extra_headers, self.media_type
        )
        await reply(scope, receive, send)


def _location(detail: Any) -> str:
    """The dotted path of a field, without the branches of unions (`str`, `list[...]`), which are
    ours."""
    parts = [str(part) for part in detail["loc"] if "[" not in str(part)]
    if detail["type"] == "string_type" and parts[-1:] == ["str"]:
        parts.pop()
    return ".".join(parts)


def _describe_validation(details: Sequence[Any]) -> APIError:
    """All schema failures in one line; `param` is the dotted location of the first."""
    lines = []
    for detail in details[:5]:
        where = _location(detail)
        message = detail["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {message}" if where else message)
    if len(details) > 5:
        lines.append(f"and {len(details) - 5} more")
    param = _location(details[0]) or None
    return APIError(HTTPStatus.BAD_REQUEST, "Bad Request", "; ".join(lines), param)


def describe(error: BaseException) -> APIError:
    """The reply for `error`; anything unexpected is logged and becomes a plain 500."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, VLLMValidationError):
        return APIError(HTTPStatus.BAD_REQUEST, "BadRequestError", error.message, error.parameter)
    if isinstance(error, ValidationError):
        return _describe_validation(
            error.errors(include_url=False, include_context=False, include_input=False)
        )
    if isinstance(error, RequestValidationError):
        return _describe_validation(error.errors())
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        type_ = "NotFoundError" if error.status_code == HTTPStatus.NOT_FOUND else phrase
        return APIError(error.status_code, type_, str(error.detail))
    if isinstance(error, EngineSleepingError):
        return APIError(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", str(error))
    if isinstance(error, EngineDeadError | EngineGenerateError):
        message = str(error) or type(error).__name__
        return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", message)
    logger.error("request failed", exc_info=error)
    return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", _INTERNAL)


def error_response(request: Request, error: Exception) -> Response:
    """The reply for `error`, its trace logged when the server runs with --log-error-stack."""
    if request.app.state.log_error_stack:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else None
    return describe(error).response(headers)


def install_handlers(app: FastAPI) -> None:
    """Answer every exception of a route with an error object."""

    async def handle(request: Request, error: Exception) -> Response:
        return error_response(request, error)

    for kind in (
        APIError,
        VLLMValidationError,
        ValidationError,
        RequestValidationError,
        HTTPException,
        EngineDeadError,
        EngineGenerateError,
        EngineSleepingError,
        Exception,
    ):
        app.add_exception_handler(kind, handle)
