# SPDX-License-Identifier: Apache-2.0
"""One request: what is asked for, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One request; lengths in tokens, `prompt_len` None where no tokenizer counted it."""

    prompt: str
    prompt_len: int | None
    output_len: int


@dataclass
class Outcome:
    """Times in seconds; `start` counts from the beginning of the benchmark.

    `itl` are the gaps between the chunks that carried text, `latency` the time to the last one.
    `error` is set when the request failed; then the other fields hold what came before.
    """

    start: float
    prompt_len: int
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None when there was one token or none."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)
