# SPDX-License-Identifier: Apache-2.0
"""One request's outputs on their way to an asynchronous consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

#: takes text that a completion (its index) got with some tokens (their number), if it can do so
#: without waiting; else says False, and the text comes as an output
TakeText = Callable[[int, str, int], bool]


class Wakes:
    """Wakes consumers at once or, while it is held, together when it is released: outputs that the
    handler has not looked at yet may go out with those at hand."""

    def __init__(self) -> None:
        self.are_held = False
        self._streams: list[OutputStream] = []

    def hold(self) -> None:
        """From now on consumers wait, except for those of a first output or an error."""
        self.are_held = True

    def release(self) -> None:
        """Wake those who wait."""
        self.are_held = False
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.wake()

    def wake(self, stream: OutputStream) -> None:
        """Wake the consumer of `stream`, or note it."""
        if self.are_held:
            self._streams.append(stream)
        else:
            stream.wake()


class OutputStream:
    """Outputs the consumer has not taken are merged, so a slow consumer holds back nobody.

    Used on one event loop, by one consumer. `take_text`: takes text in its place, while it waits.
    """

    def __init__(
        self,
        output_kind: RequestOutputKind,
        wakes: Wakes | None = None,
        take_text: TakeText | None = None,
    ) -> None:
        self.request_ids: list[str] = []
        self._take_text = take_text
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

    def put_text(self, index: int, text: str, num_tokens: int) -> bool:
        """Hand on new text of a completion and nothing else, if the consumer waits for it and can
        take it like this; else it is to be put as an output."""
        if (
            self._take_text is None
            or self._output is not None
            or self._waiter is None
            or self._waiter.done()
            or self._wakes.are_held
        ):
            return False
        try:
            return self._take_text(index, text, num_tokens)
        except Exception as error:
            self.fail(error)
            return True

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
