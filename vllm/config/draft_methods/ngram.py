# SPDX-License-Identifier: Apache-2.0
"""Settings of `ngram`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from vllm.config.draft_methods.base import DraftSettings, refuse

_DEFAULT = 5
#: the longest suffix that one program of the kernel compares
MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class NgramSettings(DraftSettings):
    """Prompt lookup: the newest `prompt_lookup_min` to `prompt_lookup_max` tokens of a request are
    looked up among those before them. Both are 5 by default; if one is given, so is the other.

    `model` is another way to choose the method, and says nothing more.
    """

    method: ClassVar[str] = "ngram"

    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in (None, "ngram"):
            refuse("model", "must be absent with method ngram: it has no draft model", self.model)
        most = self.prompt_lookup_max or self.prompt_lookup_min or _DEFAULT
        least = self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT
        for key, value in (("max", self.prompt_lookup_max), ("min", self.prompt_lookup_min)):
            if value is not None and not 1 <= value <= MOST_TOKENS:
                refuse(f"prompt_lookup_{key}", f"must be 1 to {MOST_TOKENS}, got {value}", value)
        if least > most:
            refuse(
                "prompt_lookup_min",
                f"must be at most prompt_lookup_max, {most}; got {least}",
                least,
            )
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", least)

    @property
    def lengths(self) -> tuple[int, int]:
        """The fewest and the most tokens that are looked up."""
        return cast(int, self.prompt_lookup_min), cast(int, self.prompt_lookup_max)
