# SPDX-License-Identifier: Apache-2.0
"""What a request asks of the prefix cache, and what the cache reports back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from vllm.exceptions import VLLMValidationError

#: Why tokens that some state group still had, or had once, were computed again. `evicted`: memory
#: was needed; `no_checkpoint`: no recurrent state was kept at a token count that would do;
#: `partial_block`: only whole blocks are shared; `salt`: only requests with the same salt share;
#: `next_token`: a drafter's rows depend on the token after them, which is another one here;
#: `not_read`: the request needs every position computed (prompt_logprobs) or said so.
LossReason = Literal["evicted", "no_checkpoint", "partial_block", "salt", "next_token", "not_read"]
#: longest time a prefix may stay pinned
MAX_PIN_SECONDS = 86_400.0


class CacheOptions(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """`checkpoints`: prompt token counts at which later requests should be able to continue;
    `pin_seconds`: how long the request's prefix is kept from eviction after its end; `report`:
    whether the response carries a `CacheReport`."""

    checkpoints: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    report: bool = False

    @classmethod
    def validated(
        cls,
        checkpoints: Sequence[int] | None = None,
        pin_seconds: float | None = None,
        report: bool | None = None,
    ) -> CacheOptions:
        """Raises `VLLMValidationError` for offsets that are no positive integers and for a time
        outside `[0, 86400]`."""
        offsets = tuple(checkpoints or ())
        for offset in offsets:
            if type(offset) is not int or not 1 <= offset < 2**31:
                raise VLLMValidationError(
                    f"cache_checkpoints must be positive token counts, got {offset!r}",
                    "cache_checkpoints",
                    offset,
                )
        seconds = 0.0 if pin_seconds is None else float(pin_seconds)
        if not 0 <= seconds <= MAX_PIN_SECONDS:
            raise VLLMValidationError(
                f"cache_pin_seconds must be between 0 and {MAX_PIN_SECONDS:.0f}, got {seconds}",
                "cache_pin_seconds",
                pin_seconds,
            )
        return cls(tuple(sorted(set(offsets))), seconds, bool(report))


class GroupMatch(msgspec.Struct, frozen=True):
    """How much of the prompt one state group could have continued on its own.

    `kind`: the group's spec, as in `vllm explain`; `matched_tokens`: 0 to one less than the prompt.
    """

    group: int
    kind: str
    matched_tokens: int


class CacheReport(msgspec.Struct, frozen=True):
    """A receipt: what the prefix cache did for one request.

    `limited_by`: the group that ended the hit, None if no group had more. `lost_tokens`: tokens
    after the hit that some group still had, or that were evicted, and `reason` why they had to be
    computed again; 0 and None when everything known was used. `data_parallel_rank`: the replica
    that computed it, where there are several; else it is left out of the JSON.
    """

    prompt_tokens: int
    cached_tokens: int
    groups: list[GroupMatch]
    limited_by: int | None = None
    lost_tokens: int = 0
    reason: LossReason | None = None
    data_parallel_rank: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        if self.data_parallel_rank is None:
            del result["data_parallel_rank"]
        return result
