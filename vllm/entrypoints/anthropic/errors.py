# SPDX-License-Identifier: Apache-2.0
"""Errors in the form that Anthropic's clients know."""

from http import HTTPStatus
from typing import Any

#: the route, with everything below it
PATH = "/v1/messages"
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def error_body(status: int, message: str, param: str | None) -> dict[str, Any]:
    """The error object; its message names the field at fault, there is no other place for it."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    type_ = _TYPES.get(HTTPStatus(status), other)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": type_, "message": message}}
