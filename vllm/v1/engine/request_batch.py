# SPDX-License-Identifier: Apache-2.0
"""Requests of one caller on their way to the core, as few messages as do not keep it waiting."""

from __future__ import annotations

from collections.abc import Callable

from vllm.config import SchedulerConfig
from vllm.v1.engine import EngineCoreRequest


class RequestBatch:
    """Hands prepared requests to `send` once they fill a step, and the rest when told.

    Requests sent one by one would be scheduled one by one: the core starts with the first while
    the next is being tokenised, and runs a step for it alone.
    """

    def __init__(
        self, scheduler: SchedulerConfig, send: Callable[[list[EngineCoreRequest]], None]
    ) -> None:
        self._send = send
        self._max_requests = scheduler.max_num_seqs
        self._max_tokens = scheduler.max_num_batched_tokens
        self._requests: list[EngineCoreRequest] = []
        self._num_tokens = 0

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Requests of one prompt."""
        self._requests += requests
        self._num_tokens += sum(len(request.prompt_token_ids) for request in requests)
        if len(self._requests) >= self._max_requests or self._num_tokens >= self._max_tokens:
            self.send()

    def send(self) -> None:
        """Send what there is."""
        self._send(self._requests)
        self._requests = []
        self._num_tokens = 0
