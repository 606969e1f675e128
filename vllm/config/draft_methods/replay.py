# SPDX-License-Identifier: Apache-2.0
"""Settings of `replay`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.config.draft_methods.base import DraftSettings, refuse


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(DraftSettings):
    """A drafter that proposes what requests bring: `num_speculative_tokens` per step, each of them
    the request's with probability `acceptance` and a random one else, drawn by `seed`."""

    method: ClassVar[str] = "replay"
    brought_by_requests: ClassVar[bool] = True

    acceptance: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.acceptance <= 1:
            refuse("acceptance", f"must be 0 to 1, got {self.acceptance}", self.acceptance)
