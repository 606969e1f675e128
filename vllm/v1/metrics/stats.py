# SPDX-License-Identifier: Apache-2.0
"""What is measured, before it becomes metrics. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.engine import FinishReason


@dataclass
class RequestStateStats:
    """Moments of one request; `arrival_time` is wall-clock, the others are monotonic (0: not yet).

    `num_prompt_tokens`, `num_generation_tokens` count tokens so far, `num_cached_tokens` the prompt
    tokens found in a cache.
    """

    arrival_time: float = 0.0
    arrival_ts: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class FinishedRequestStats:
    """One finished request. Intervals that never began are None.

    `longest_completion`: tokens of the longest of the n completions, with the last of them.
    """

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    longest_completion: int | None
    max_tokens: int | None
    n: int
    e2e_latency: float
    queued_time: float | None
    prefill_time: float | None
    decode_time: float | None
    inference_time: float | None
    time_per_output_token: float | None


@dataclass
class IterationStats:
    """What one message from the core brought."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    times_to_first_token: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)
    #: stages at which requests failed
    failures: list[str] = field(default_factory=list)

    def add_tokens(
        self,
        stats: RequestStateStats,
        num_new_tokens: int,
        timestamp: float,
        times: tuple[float, float] | None,
    ) -> None:
        """Count new tokens of a request; `times` (queued, scheduled) come with its first."""
        if times is not None:
            stats.queued_ts, stats.scheduled_ts = times
        if not num_new_tokens:
            return
        self.num_generation_tokens += num_new_tokens
        stats.num_generation_tokens += num_new_tokens
        if not stats.first_token_ts:
            stats.first_token_ts = timestamp
            self.num_prompt_tokens += stats.num_prompt_tokens
            self.num_cached_tokens += stats.num_cached_tokens
            self.times_to_first_token.append(max(0.0, timestamp - stats.arrival_ts))
        else:
            self.inter_token_latencies.append(timestamp - stats.last_token_ts)
        stats.last_token_ts = timestamp

    def add_next_tokens(
        self, stats: RequestStateStats, num_new_tokens: int, timestamp: float
    ) -> None:
        """Count new tokens of a request that had its first."""
        self.num_generation_tokens += num_new_tokens
        stats.num_generation_tokens += num_new_tokens
        self.inter_token_latencies.append(timestamp - stats.last_token_ts)
        stats.last_token_ts = timestamp

    def add_finished(
        self,
        stats: RequestStateStats,
        reason: FinishReason,
        timestamp: float,
        max_tokens: int | None,
        n: int,
        longest_completion: int | None = None,
    ) -> None:
        stats.finished_ts = timestamp
        started = stats.scheduled_ts > 0
        produced = stats.first_token_ts > 0
        decode = stats.last_token_ts - stats.first_token_ts if produced else None
        intervals = stats.num_generation_tokens - 1
        self.finished.append(
            FinishedRequestStats(
                finish_reason=reason,
                num_prompt_tokens=stats.num_prompt_tokens,
                num_cached_tokens=stats.num_cached_tokens,
                longest_completion=longest_completion,
                num_generation_tokens=stats.num_generation_tokens,
                max_tokens=max_tokens,
                n=n,
                e2e_latency=max(0.0, timestamp - stats.arrival_ts),
                queued_time=stats.scheduled_ts - stats.queued_ts if started else None,
                prefill_time=stats.first_token_ts - stats.scheduled_ts if produced else None,
                decode_time=decode,
                inference_time=stats.last_token_ts - stats.scheduled_ts if produced else None,
                time_per_output_token=(
                    decode / intervals if decode is not None and intervals > 0 else None
                ),
            )
        )
