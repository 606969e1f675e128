# SPDX-License-Identifier: Apache-2.0
"""How requests are batched."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vllm.exceptions import VLLMValidationError
from vllm.utils.options import FlagKind, config, option


@config
class SchedulerConfig:
    """Limits and policy of the scheduler."""

    max_num_batched_tokens: PositiveInt = option(
        default=2048,
        resolved=True,
        kind=FlagKind.HUMAN_INT,
        help="Tokens processed in one step. Default: 8192 (server) or 16384 (offline) on devices "
        "of 70 GiB or more, else 2048 or 8192.",
    )
    max_num_seqs: PositiveInt = option(
        default=256,
        resolved=True,
        help="Requests in one step. Default: 1024 on devices of 70 GiB or more, else 256.",
    )
    max_model_len: PositiveInt = option(
        default=8192, flag=False, help="Tokens of the longest sequence (the model config's)."
    )
    enable_chunked_prefill: bool = option(
        default=True, resolved=True, help="Split long prompts over steps."
    )
    policy: Literal["fcfs", "priority"] = option(
        default="fcfs",
        name="scheduling_policy",
        help="Order of waiting requests: arrival, or the request's priority (lower first).",
    )
    async_scheduling: bool = option(
        default=True,
        resolved=True,
        help="Schedule a step while the previous one still runs.",
    )
    long_prefill_token_threshold: NonNegativeInt = option(
        default=0, help="Longest prompt chunk of one request in a step; 0 is no limit."
    )
    stream_interval: PositiveInt = option(
        default=1, help="Tokens between two messages of a stream; the first is sent at once."
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = option(
        default=0.0, help="Fraction of state memory kept free when a request is admitted."
    )
    scheduler_cls: str | None = option(
        default=None, help="Dotted path of a scheduler class to use instead of the built-in one."
    )
    disable_hybrid_kv_cache_manager: bool = option(
        default=False,
        resolved=True,
        help="Give every layer the same cache geometry. Default: off, unless a KV connector cannot "
        "handle several cache groups.",
    )

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise VLLMValidationError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs})",
                parameter="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise VLLMValidationError(
                f"without --enable-chunked-prefill, --max-num-batched-tokens "
                f"({self.max_num_batched_tokens}) must be at least --max-model-len "
                f"({self.max_model_len}), or prompts longer than a step could never run",
                parameter="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
            )
