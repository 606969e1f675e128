# SPDX-License-Identifier: Apache-2.0
"""Errors whose message says all: of bad input, before the engine sees it, and of other programs
that a start needs."""

from typing import Any


class ExplainedError(Exception):
    """An error that its message explains to whoever can mend it: it is shown without a trace."""


class StartTimeoutError(ExplainedError, TimeoutError):
    """What a start waits for, and others have to bring, has not come in time."""


class HangError(ExplainedError, TimeoutError):
    """What somebody waits for does not go on."""


class VLLMValidationError(ExplainedError, ValueError):
    """A value given by the user is wrong.

    `parameter` names the offending parameter or flag (dotted for nested ones) and `value` what was
    given, so that the HTTP layer can fill `error.param` without parsing the message.
    """

    def __init__(
        self, message: str, parameter: str | None = None, value: Any | None = None
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.parameter, self.value)
