# SPDX-License-Identifier: Apache-2.0
"""Errors of a running engine."""


class EngineGenerateError(Exception):
    """A request, which the message names, or a call failed; the engine goes on."""


class EngineSleepingError(Exception):
    """The engine sleeps; requests are taken again after `wake_up`."""


class EngineDeadError(Exception):
    """The engine stopped working; every pending and later request fails with this."""

    def __init__(self, cause: str | None = None) -> None:
        self.cause = cause
        super().__init__(f"the engine core is dead: {cause or 'see the log above for the cause'}")
