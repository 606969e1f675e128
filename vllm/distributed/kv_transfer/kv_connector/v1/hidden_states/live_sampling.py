# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of live capture: who is asked, who is chosen, what is kept."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.live_saving import LiveSave
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.metadata import RowsMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import (
    ended_badly,
    missing_rows,
)
from vllm.v1.request import Request

#: key of a request's `kv_transfer_params` by which its sender agrees
CONSENT = "capture"


@dataclass
class LiveCaptureMetadata(RowsMetadata):
    """One step: finished requests to capture."""

    pending_saves: list[LiveSave] = field(default_factory=list)


def check_consent(params: dict[str, Any]) -> None:
    """ValueError unless the consent is yes or no, or not there."""
    if not isinstance(params.get(CONSENT, False), bool):
        raise ValueError(f"{CONSENT} must be true or false")


def is_sampled(req_id: str, rate: float) -> bool:
    """Whether a request is among the `rate` of all; it follows from the id."""
    digest = hashlib.blake2b(req_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


class LiveScheduler:
    """Bookkeeping of one engine."""

    def __init__(self, rate: float, block_size: int) -> None:
        self._rate = rate
        self._block_size = block_size
        self._pending: list[LiveSave] = []

    @property
    def has_pending(self) -> bool:
        """Whether saves wait for the next step's message."""
        return bool(self._pending)

    def build_meta(self) -> LiveCaptureMetadata:
        saves, self._pending = self._pending, []
        return LiveCaptureMetadata(saves)

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """Whether the request's blocks are needed until the worker says that they are not."""
        params = request.kv_transfer_params or {}
        if not params.get(CONSENT, False) or ended_badly(request):
            return False
        if not is_sampled(request.request_id, self._rate):
            return False
        # The last token was sampled but never went through the model: it has no row.
        token_ids = request.all_token_ids[:-1]
        if missing_rows(request, token_ids, len(block_ids) * self._block_size) is not None:
            return False
        if not request.num_prompt_tokens < len(token_ids) + 1:
            return False
        self._pending.append(
            LiveSave(
                req_id=request.request_id,
                token_ids=torch.tensor(token_ids, dtype=torch.int64),
                num_prompt=request.num_prompt_tokens,
                block_ids=list(block_ids),
            )
        )
        return True
