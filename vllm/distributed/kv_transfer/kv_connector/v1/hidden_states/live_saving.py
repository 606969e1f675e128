# SPDX-License-Identifier: Apache-2.0
"""The worker side of live capture: a sample is taken if there is room for it at once, or never."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import tensor_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.live_dataset import LiveDataset
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.live_stats import (
    BUDGET,
    BUSY,
    FAILED,
    LiveCaptureStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.metadata import RowSave
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.writer_pool import WriterPool
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass
class LiveSave(RowSave):
    """A finished request to capture; the first `num_prompt` of its tokens are the prompt's."""

    num_prompt: int


class LiveSaver:
    """Used from the worker's step thread; writes on others. `budget`: bytes of the dataset."""

    def __init__(
        self, copier: RowCopier, dataset: LiveDataset, *, budget: int, num_writer_threads: int
    ) -> None:
        self._copier = copier
        self._dataset = dataset
        self._budget = budget
        self._pool = WriterPool(num_writer_threads)
        self._copying: dict[str, CopyEvent] = {}
        self._lock = threading.Lock()
        #: bytes on disk or on their way there
        self._promised = dataset.num_bytes
        self._stats = LiveCaptureStats()

    def step(self, saves: Iterable[LiveSave], finished_req_ids: set[str]) -> set[str]:
        """Start copies where there is room, drop the rest; returns the requests whose blocks are
        not needed any more."""
        done = {save.req_id for save in saves if not self._take(save)}
        done |= {req_id for req_id, event in self._copying.items() if event.query()}
        for req_id in done:
            self._copying.pop(req_id, None)
        return done

    def take_stats(self) -> LiveCaptureStats:
        """Since the last call."""
        with self._lock:
            stats, self._stats = self._stats, LiveCaptureStats()
        return stats

    def shutdown(self) -> None:
        """Finish what was taken."""
        self._pool.drain()
        self._dataset.close()

    def _take(self, save: LiveSave) -> bool:
        num_tokens = len(save.token_ids)
        row_bytes = self._copier.format.row_bytes + torch.int64.itemsize
        num_bytes = tensor_file.HEADER_ALLOWANCE + num_tokens * row_bytes
        with self._lock:
            reason = None
            if self._promised + num_bytes > self._budget:
                reason = BUDGET
            elif not self._pool.has_room:
                reason = BUSY
            if reason is not None:
                self._stats.drop(reason)
                return False
            self._promised += num_bytes
            self._stats.take(num_bytes)
        rows, event = self._copier.copy(save.block_ids, num_tokens)
        self._copying[save.req_id] = event
        tensors = {**rows.tensors, "token_ids": save.token_ids}
        self._pool.submit(partial(self._write, save, tensors, event, num_bytes))
        return True

    def _write(
        self, save: LiveSave, tensors: dict[str, Tensor], event: CopyEvent, num_bytes: int
    ) -> None:
        """On a writer thread."""
        try:
            event.synchronize()
            self._dataset.add(tensors, save.num_prompt, self._copier.format.metadata)
        except Exception:
            logger.exception("request %s: its hidden states were not captured", save.req_id)
            with self._lock:
                self._promised -= num_bytes
                self._stats.drop(FAILED)
