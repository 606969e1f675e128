# SPDX-License-Identifier: Apache-2.0
"""Giving a device's memory back for a while, and taking it again.

Memory is released storage by storage, so every view of it (tied weights, a layer's part of the
arena, a connector's cache) stays bound and is valid again after waking. Addresses change: graphs
are dropped and captured anew.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, UntypedStorage

from vllm import decisions
from vllm.model_executor.host_weights import is_on_host
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.zeroed_memory import zero


class ParkedMemory:
    """The storages behind some tensors, released; with `keep` their bytes wait in host memory."""

    def __init__(self, tensors: Iterable[Tensor], keep: bool) -> None:
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        self._parked = [(s, s.nbytes(), _to_host(s) if keep else None) for s in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size, _ in self._parked)

    def restore(self) -> None:
        """Allocate again; what was not kept is zero."""
        for storage, size, kept in self._parked:
            storage.resize_(size)
            if kept is None:
                zero(_bytes_of(storage))
            else:
                _bytes_of(storage).copy_(kept)
        self._parked = []


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """The storage as `uint8 [bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: UntypedStorage) -> Tensor:
    """A copy, page-locked so that waking up runs at the link's speed."""
    pinned = storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).copy_(
        _bytes_of(storage)
    )


class Sleeper:
    """What of a runner is asleep; the caller sees to it that no step is in flight."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._asleep: dict[str, list[ParkedMemory]] = {}
        self._reload = False
        self._captured = False

    def sleep(self, level: int) -> int:
        """Release the arena and the weights (see `LLM.sleep`); returns the bytes released.

        On a CPU the weights are in host memory already, so level 1 leaves them there. After an
        error `wake_up` brings back what was released before.
        """
        runner, on_host = self._runner, self._runner.device.type == "cpu"
        self._captured = runner.drop_graphs()
        weights: list[ParkedMemory] = []
        arena: list[ParkedMemory] = []
        self._asleep = {"weights": weights, "kv_cache": arena}
        self._reload = level == 2
        parameters = [param for model in runner.models for param in model.parameters()]
        if level == 2:
            weights.append(ParkedMemory(parameters, keep=False))
        elif on_host:
            decisions.record("sleep level 1", "weights stay", "they are in host memory already")
        else:
            awake = [param for param in parameters if not is_on_host(param)]
            weights.append(ParkedMemory(awake, keep=True))
        if not on_host:
            # No checkpoint has the buffers (rotary tables), so every level keeps them.
            buffers = [buffer for model in runner.models for buffer in model.buffers()]
            weights.append(ParkedMemory(buffers, keep=True))
        state = [runner.arena.buffer, *runner.journal_pool.tensors]
        arena.append(ParkedMemory(state, keep=False))
        self._collect()
        return sum(parked.num_bytes for group in self._asleep.values() for parked in group)

    def wake_up(self, tags: Collection[str]) -> None:
        """Restore "weights", "kv_cache" or both; what is awake stays as it is."""
        for tag in [tag for tag in self._asleep if tag in tags]:
            for parked in self._asleep[tag]:
                parked.restore()
            if tag == "weights" and self._reload:
                self._runner.load_weights()
            if tag == "kv_cache" and self._runner.sanitizer is not None:
                self._runner.sanitizer.memory.reset()
            del self._asleep[tag]
        if not self._asleep and self._captured:
            self._captured = False
            self._runner.capture_graphs()

    def _collect(self) -> None:
        gc.collect()
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
