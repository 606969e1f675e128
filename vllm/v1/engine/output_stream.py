# SPDX-License-Identifier: Apache-2.0
"""One request's outputs on their way to an asynchronous consumer."""

from __future__ import annotations

import asyncio

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


class OutputStream:
    """Outputs the consumer has not taken are merged, so a slow consumer holds back nobody.

    Used on one event loop, by one consumer.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self.request_ids: list[str] = []
        self._aggregate = output_kind is RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        #: what the consumer waits for
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error with which the request failed."""
        if isinstance(output, Exception):
            self.fail(output)
        elif self._output is None:
            self._output = output
            self._wake()
        else:
            self._output.add(output, aggregate=self._aggregate)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what was put before."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """The merged outputs, waiting for some; raises the stream's error when none are left."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output
