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

#: the output of a completion that got text with tokens, and nothing else
MakeTextOutput = Callable[[str, list[int]], RequestOutput]
#: takes a completion's index, its new text, the tokens that it got it with, and what makes an
#: output of them
TextSink = Callable[[int, str, list[int], MakeTextOutput], None]


class _HeldText:
    """Texts of one completion that go out together."""

    def __init__(self, make_output: MakeTextOutput) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self._make_output = make_output

    def as_output(self) -> RequestOutput:
        return self._make_output("".join(self.texts), self.token_ids)


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
        #: text by completion that came while wakes were held; there is no output beside it
        self._held_texts: dict[int, _HeldText] = {}
        self._error: Exception | None = None
        #: what the consumer waits for
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the error with which the request failed."""
        if isinstance(output, Exception):
            self.fail(output)
            return
        self._turn_held_texts()
        self._add(output)

    def _add(self, output: RequestOutput) -> None:
        if self._output is not None:
            self._output.add(output, aggregate=self._aggregate)
        else:
            self._output = output
            if self._began:
                self._wakes.wake(self)
            else:
                self._began = True
                self.wake()

    def put_text(
        self, index: int, text: str, token_ids: list[int], make_output: MakeTextOutput
    ) -> None:
        """Add new text of a completion, and nothing else: for `take_text` if the consumer waits for
        it, else as an output."""
        if self._take_text is None or self._output is not None or not self._is_awaited:
            self.put(make_output(text, token_ids))
        elif self._wakes.are_held:
            if not self._held_texts:
                self._wakes.wake(self)
            held = self._held_texts.get(index)
            if held is None:
                held = self._held_texts[index] = _HeldText(make_output)
            held.texts.append(text)
            held.token_ids += token_ids
        elif not self._offer(self._take_text, index, text, len(token_ids)):
            self.put(make_output(text, token_ids))

    @property
    def _is_awaited(self) -> bool:
        """Whether the consumer has all before and sleeps."""
        return self._waiter is not None and not self._waiter.done()

    def _offer(self, take_text: TakeText, index: int, text: str, num_tokens: int) -> bool:
        """Whether the text went away, or the stream ended for it."""
        try:
            return take_text(index, text, num_tokens)
        except Exception as error:
            self.fail(error)
            return True

    def _offer_held_texts(self) -> None:
        """Let text that was held go the short way, as far as it can."""
        while self._held_texts and self._take_text is not None and self._is_awaited:
            index, held = self._held_texts.popitem()
            text = "".join(held.texts)
            if not self._offer(self._take_text, index, text, len(held.token_ids)):
                self._held_texts[index] = held
                return

    def _turn_held_texts(self) -> None:
        """Into outputs."""
        held, self._held_texts = self._held_texts, {}
        for one in held.values():
            self._add(one.as_output())

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what was put before."""
        self._turn_held_texts()
        if self._error is None:
            self._error = error
        self.wake()

    def wake(self) -> None:
        """Let the consumer look, if there is anything left for it."""
        self._offer_held_texts()
        self._turn_held_texts()
        if self._output is None and self._error is None:
            return
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
