# SPDX-License-Identifier: Apache-2.0
"""Requests of one caller on their way to the core, as few messages as do not keep it waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreRequest

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig


class RequestBatch:
    """Hands prepared requests to `send` once they fill a step, and the rest when told.

    Requests sent one by one would be scheduled one by one: the core starts with the first while
    the next is being tokenised, and runs a step for it alone. `num_replicas` steps run at a time.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        send: Callable[[list[EngineCoreRequest]], None],
        num_replicas: int = 1,
    ) -> None:
        self._send = send
        self._max_sequences = scheduler.max_num_seqs * num_replicas
        self._max_tokens = scheduler.max_num_batched_tokens * num_replicas
        self._requests: list[EngineCoreRequest] = []
        self._num_sequences = self._num_tokens = 0

    def add(self, request: EngineCoreRequest) -> None:
        """The request of one prompt, for one or more completions."""
        num_sequences = request.sampling_params.n
        self._requests.append(request)
        self._num_sequences += num_sequences
        self._num_tokens += len(request.prompt_token_ids) * num_sequences
        if self._num_sequences >= self._max_sequences or self._num_tokens >= self._max_tokens:
            self.send()

    def send(self) -> None:
        """Send what there is."""
        self._send(self._requests)
        self._requests = []
        self._num_sequences = self._num_tokens = 0
