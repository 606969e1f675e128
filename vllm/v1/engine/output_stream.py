# SPDX-License-Identifier: Apache-2.0
"""One request's outputs on their way to an asynchronous consumer."""

from __future__ import annotations

import asyncio

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


class Wakes:
    """Wakes consumers at once or, while it is held, together when it is released: outputs that the
    handler has not looked at yet may go out with those at hand."""

    def __init__(self) -> None:
        self._held = False
        self._streams: list[OutputStream] = []

    def hold(self) -> None:
        """From now on consumers wait, except for those of a first output or an error."""
        self._held = True

    def release(self) -> None:
        """Wake those who wait."""
        self._held = False
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.wake()

    def wake(self, stream: OutputStream) -> None:
        """Wake the consumer of `stream`, or note it."""
        if self._held:
            self._streams.append(stream)
        else:
            stream.wake()


class OutputStream:
    """Outputs the consumer has not taken are merged, so a slow consumer holds back nobody.

    Used on one event loop, by one consumer.
    """

    def __init__(self, output_kind: RequestOutputKind, wakes: Wakes | None = None) -> None:
        self.request_ids: list[str] = []
        self._aggregate = output_kind is RequestOutputKind.DELTA
        self._wakes = wakes or Wakes()
        self._began = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        #: what the consumer waits for
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error with which the request failed."""
        if isinstance(output, Exception):
            self.fail(output)
        elif self._output is not None:
            self._output.add(output, aggregate=self._aggregate)
        else:
            self._output = output
            if self._began:
                self._wakes.wake(self)
            else:
                self._began = True
                self.wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what was put before."""
        if self._error is None:
            self._error = error
        self.wake()

    def wake(self) -> None:
        """Let the consumer look."""
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
