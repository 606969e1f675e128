# SPDX-License-Identifier: Apache-2.0
"""Token counts while a stream runs."""

from typing import Any

from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.serving_engine import OpenAIServing, total_drafts
from vllm.outputs import RequestOutput


class StreamUsage:
    """Adds up what the chunks of one stream have carried."""

    def __init__(
        self, serving: OpenAIServing, request: GenerationRequest, prompt_lengths: list[int]
    ) -> None:
        self._serving = serving
        self.at_end = serving.include_usage(request)
        self.on_every_chunk = serving.continuous_usage(request)
        self._num_prompt = sum(prompt_lengths)
        self._num_generated = 0
        self._cached: dict[int, int] = {}
        self._drafts: tuple[int, int] | None = None

    def seen(self, prompt_index: int, output: RequestOutput) -> None:
        """Note an engine output of prompt `prompt_index`."""
        self._cached[prompt_index] = max(0, output.num_cached_tokens or 0)
        new = total_drafts(output.outputs)
        if new is not None:
            accepted, rejected = self._drafts or (0, 0)
            self._drafts = accepted + new[0], rejected + new[1]

    def generated(self, num_tokens: int) -> None:
        """Count tokens that go out with the next chunk."""
        self._num_generated += num_tokens

    def as_dict(self) -> dict[str, Any]:
        """The `usage` object so far."""
        usage = self._serving.usage(
            self._num_prompt, self._num_generated, sum(self._cached.values()), self._drafts
        )
        return usage.model_dump(exclude_none=True)
