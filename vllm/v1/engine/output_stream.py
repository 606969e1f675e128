# SPDX-License-Identifier: Apache-2.0
"""One request's outputs on their way to an asynchronous consumer."""

from __future__ import annotations

import asyncio

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


class OutputStream:
    """Outputs the consumer has not taken are merged, so a slow consumer holds back nobody.

    Used on one event loop.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self.request_ids: list[str] = []
        self._aggregate = output_kind is RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error with which the request failed."""
        if isinstance(output, Exception):
            self.fail(output)
        elif self._output is None:
            self._output = output
            self._ready.set()
        else:
            self._output.add(output, aggregate=self._aggregate)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what was put before."""
        if self._error is None:
            self._error = error
        self._ready.set()

    def take(self) -> RequestOutput | None:
        """The merged outputs, if any are there; raises the stream's error when none are."""
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        if self._error is None:
            self._ready.clear()
        return output

    async def get(self) -> RequestOutput:
        """Wait for outputs."""
        while (output := self.take()) is None:
            await self._ready.wait()
        return output
