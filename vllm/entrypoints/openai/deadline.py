# SPDX-License-Identifier: Apache-2.0
"""How long one request may take (`--request-timeout`)."""

from __future__ import annotations

import time
from http import HTTPStatus

from vllm.entrypoints.openai.errors import APIError


class Deadline:
    """Starts with the request; `timeout_s` None never ends."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """Seconds left, 0 when it is over, None when there is no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def error(self) -> APIError:
        """What the client of a late request is told."""
        return APIError(
            HTTPStatus.GATEWAY_TIMEOUT,
            "TimeoutError",
            f"The request took longer than {self._timeout_s:g} s (--request-timeout) and was "
            "aborted; ask for fewer tokens or try again when the server is less busy.",
        )


def shutting_down() -> APIError:
    """What clients are told whose requests outlast --shutdown-timeout."""
    return APIError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailable",
        "The server is shutting down and the request was aborted.",
    )
