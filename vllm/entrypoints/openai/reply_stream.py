# SPDX-License-Identifier: Apache-2.0
"""The events of a streamed reply, and the tokens counted on the way."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.serving_engine import OpenAIServing, total_drafts
from vllm.entrypoints.openai.streaming import Outlet, event
from vllm.outputs import RequestOutput


class ReplyStream(ABC):
    """Turns the outputs of one request into events. `head`: what every chunk begins with."""

    def __init__(
        self,
        serving: OpenAIServing,
        request: GenerationRequest,
        prompt_lengths: Sequence[int],
        head: dict[str, Any],
    ) -> None:
        self._serving = serving
        self._head = head
        always = serving.options.force_include_usage
        self._usage_at_end = always or request.include_usage
        self._usage_on_every_chunk = always or request.continuous_usage
        self._num_prompt = sum(prompt_lengths)
        #: tokens in the chunks so far
        self._num_generated = 0
        self._cached: dict[int, int] = {}
        self._drafts: tuple[int, int] | None = None
        self._num_choices = request.num_choices
        #: takes text of a single prompt's choices
        self.outlet = Outlet()

    async def events(
        self, source: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[bytes, None]:
        """The encoded events of each output, without `[DONE]`."""
        try:
            async for prompt_index, output in source:
                events = self._short(prompt_index, output)
                if events is None:
                    self._seen(prompt_index, output)
                    make = partial(self._events, prompt_index, output)
                    events = await self._serving.build([output], make)
                if events:
                    yield events
        finally:
            await source.aclose()
        if self._usage_at_end:
            yield event({**self._head, "choices": [], "usage": self._usage()})

    @abstractmethod
    def _events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The events of an output, in any thread."""

    def _short(self, prompt_index: int, output: RequestOutput) -> bytes | None:
        """The events of an output that has nothing to count but its tokens; else None."""
        return None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._usage_on_every_chunk:
            chunk["usage"] = self._usage()
        return chunk

    def _seen(self, prompt_index: int, output: RequestOutput) -> None:
        self._cached[prompt_index] = max(0, output.num_cached_tokens or 0)
        new = total_drafts(output.outputs)
        if new is not None:
            accepted, rejected = self._drafts or (0, 0)
            self._drafts = accepted + new[0], rejected + new[1]

    def _usage(self) -> dict[str, Any]:
        """The `usage` object so far."""
        usage = self._serving.usage(
            self._num_prompt, self._num_generated, sum(self._cached.values()), self._drafts
        )
        return usage.model_dump(exclude_none=True)


class TextStream(ReplyStream):
    """Frames new text from templates; choices are counted through all prompts."""

    @abstractmethod
    def _goes_on(self, index: int) -> bool:
        """Whether the next event of choice `index` holds nothing but its text, unless it ends."""

    @abstractmethod
    def _text_event(self, index: int, text: str) -> bytes:
        """The event for new text of a choice that goes on; empty while the text is kept back."""

    def take_text(self, index: int, text: str, num_tokens: int) -> bool:
        """Write the event of an output that would hold nothing but new text of choice `index` of
        a single prompt, unless it has to wait or to be more than that."""
        if not (self.outlet.is_ready and self._goes_on(index)):
            return False
        self._num_generated += num_tokens
        if events := self._text_event(index, text):
            self.outlet.write(events)
        return True

    def _short(self, prompt_index: int, output: RequestOutput) -> bytes | None:
        if len(output.outputs) != 1:
            return None
        completion = output.outputs[0]
        index = prompt_index * self._num_choices + completion.index
        if (
            not (completion.token_ids and self._goes_on(index))
            or completion.finish_reason is not None
            or completion.kv_transfer_params is not None
        ):
            return None
        self._num_generated += len(completion.token_ids)
        return self._text_event(index, completion.text)
