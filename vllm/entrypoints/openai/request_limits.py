# SPDX-License-Identifier: Apache-2.0
"""How much of anything one request may ask for (`--request-limits`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

FLAG = "--request-limits"


class SamplingLists(Protocol):
    """The lists that a request and `SamplingParams` have in common."""

    @property
    def bad_words(self) -> list[str] | None: ...
    @property
    def stop(self) -> str | list[str] | None: ...
    @property
    def stop_token_ids(self) -> list[int] | None: ...
    @property
    def logit_bias(self) -> Mapping[Any, float] | None: ...


@dataclass(frozen=True)
class RequestLimits:
    """Largest counts and lengths in one request; docs/server.md says what each is for."""

    sequences: int = 256
    stop: int = 64
    stop_chars: int = 4096
    stop_token_ids: int = 1024
    bad_words: int = 1024
    bad_words_chars: int = 16_384
    logit_bias: int = 1024
    cache_checkpoints: int = 64
    messages: int = 4096
    tools: int = 512
    schema_chars: int = 65_536
    chars_per_token: int = 16

    @classmethod
    def from_flag(cls, given: Mapping[str, int]) -> RequestLimits:
        """The defaults with the `given` ones in their place; raises `VLLMValidationError` for an
        unknown name or a number below 1."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise VLLMValidationError(
                    f"{FLAG}: unknown limit {name!r}; known: {', '.join(known)}", "request_limits"
                )
            if value < 1:
                raise VLLMValidationError(
                    f"{FLAG}: {name} must be at least 1, got {value}", "request_limits"
                )
        return cls(**given)

    def check_sequences(self, num_prompts: int, n: int) -> None:
        """Raise `VLLMValidationError` for more completions than one request may have."""
        if num_prompts * max(n, 1) > self.sequences:
            raise VLLMValidationError(
                f"{num_prompts} prompts with n={n} make more than {self.sequences} sequences "
                f"({FLAG}, sequences); split the request",
                parameter="n",
                value=n,
            )

    def check_sampling(self, given: SamplingLists | SamplingParams) -> None:
        """Raise `VLLMValidationError` naming the first list that is too long."""
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or ()
        bad_words = given.bad_words or ()
        self._check("stop", "stop", len(stop), "strings")
        self._check("stop", "stop_chars", sum(map(len, stop)), "characters")
        self._check(
            "stop_token_ids", "stop_token_ids", len(given.stop_token_ids or ()), "token ids"
        )
        self._check("bad_words", "bad_words", len(bad_words), "words")
        self._check("bad_words", "bad_words_chars", sum(map(len, bad_words)), "characters")
        self._check("logit_bias", "logit_bias", len(given.logit_bias or ()), "token ids")

    def check_checkpoints(self, given: Sequence[int] | str | None) -> None:
        """Raise `VLLMValidationError` for more marks than a request may leave."""
        if given is not None and not isinstance(given, str):
            self._check("cache_checkpoints", "cache_checkpoints", len(given), "offsets")

    def check_conversation(
        self, messages: Sequence[Any], tools: Sequence[dict[str, Any]] | None
    ) -> None:
        """Raise `VLLMValidationError` for too long a conversation or too many tools."""
        self._check("messages", "messages", len(messages), "messages")
        self._check("tools", "tools", len(tools or ()), "tools")

    def check_constraint(self, parameter: str, given: StructuredOutputsParams | None) -> None:
        """Raise `VLLMValidationError` for a constraint that would take long to compile."""
        if given is None:
            return
        size = sum(map(len, given.choice or ()))
        for text in (given.regex, given.grammar, given.structural_tag):
            size += len(text or "")
        if given.json is not None:
            size += len(given.json if isinstance(given.json, str) else json.dumps(given.json))
        self._check(parameter, "schema_chars", size, "characters")

    def _check(self, parameter: str, limit: str, count: int, what: str) -> None:
        most: int = getattr(self, limit)
        if count > most:
            raise VLLMValidationError(
                f"{parameter} has {count} {what}; this server takes at most {most} ({FLAG}, "
                f"{limit})",
                parameter=parameter,
            )
