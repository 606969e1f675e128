# SPDX-License-Identifier: Apache-2.0
"""`n > 1`: one user request as n engine requests."""

from __future__ import annotations

import msgspec

from vllm.cache_options import CacheReport
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest

_SEED_RANGE = 1 << 63


def child_requests(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """One request per completion: child i has the id `<i>_<id>`, n = 1 and seed + i; the request
    itself for n = 1.

    Both ends of the socket make them, so that n prompts are not sent. They share everything that
    is not their own.
    """
    if request.sampling_params.n == 1:
        return [request]
    return [_child(request, index) for index in range(request.sampling_params.n)]


def _child(request: EngineCoreRequest, index: int) -> EngineCoreRequest:
    params = request.sampling_params.shallow_copy()
    params.n = 1
    if params.seed is not None:
        params.seed = (params.seed + index) % _SEED_RANGE
    return msgspec.structs.replace(
        request, request_id=f"{index}_{request.request_id}", sampling_params=params
    )


class CacheReceipt:
    """What the prefix cache had of a prompt before any of its completions ran: the first of n
    computes it, the others find what the first has left."""

    def __init__(self) -> None:
        self.num_cached_tokens: int | None = None
        self.report: CacheReport | None = None

    def take(self, num_cached_tokens: int, report: CacheReport | None) -> None:
        if self.num_cached_tokens is None or num_cached_tokens < self.num_cached_tokens:
            self.num_cached_tokens = num_cached_tokens
            self.report = report or self.report
        elif self.report is None:
            self.report = report


class ParentRequest:
    """Gathers the completions of the children of one request."""

    def __init__(self, n: int, output_kind: RequestOutputKind) -> None:
        self.n = n
        self.receipt = CacheReceipt()
        self._kind = output_kind
        self._running = set(range(n))
        self._longest = 0
        self._latest: dict[int, CompletionOutput] = {}

    def add(self, completion: CompletionOutput) -> list[CompletionOutput]:
        """What to show after a child's news: its delta, all so far, or nothing before the end."""
        if completion.finished():
            self._running.discard(completion.index)
        if self._kind is RequestOutputKind.DELTA:
            return [completion]
        self._latest[completion.index] = completion
        if self._kind is RequestOutputKind.FINAL_ONLY and self._running:
            return []
        return [self._latest[index] for index in sorted(self._latest)]

    def longest(self, num_tokens: int) -> int | None:
        """Note a finished child's length; the greatest once all children are done."""
        self._longest = max(self._longest, num_tokens)
        return self._longest if self.finished else None

    @property
    def finished(self) -> bool:
        return not self._running
