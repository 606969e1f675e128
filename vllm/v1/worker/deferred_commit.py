# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states wait in a ring, and writing them to their blocks before anyone looks.

A decode step of a layer that `DefersCommit` reads the state and leaves its update in the ring of
the request's batch row; every few steps it writes the state with all of them. Everything else that
reads or moves a state block finds it complete: a row is flushed before its block is copied, before
a prefill continues it and when its request leaves the batch. All of it is decided on the host and
ordered by the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm import decisions
from vllm.config import VllmConfig
from vllm.kernels.decode_ring import RingMemory, RingStack
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, DefersCommit
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.staging import StagedArray, Uploads

#: places in a step where rows may be flushed
_FLUSHES_PER_STEP = 3


@dataclass(frozen=True)
class _RingGroup:
    """One group's layers and their rings; `stack` once the states have memory."""

    group_id: int
    layers: list[DefersCommit]
    memory: RingMemory
    stack: RingStack | None = None


class DeferredCommit:
    """The rings of one worker, and how many tokens each batch row has pending.

    A row commits every `interval` tokens, rows in turn so that steps cost the same; `slots` is one
    less. Memory is taken once, before the arena is sized; `bind` follows every new arena.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, list[DefersCommit], MambaSpec]],
        max_rows: int,
        interval: int,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
    ) -> None:
        self.pending = np.zeros(max_rows, dtype=np.int32)
        self._interval, self._slots = interval, interval - 1
        self._step = 0
        # On a CPU the staged array is the device's: one of them, so that its address is fixed.
        copies = depth if device.type == "cuda" else 1
        self._steps = StagedArray((max_rows, 4), torch.int32, device, copies, uploads)
        copies = depth * _FLUSHES_PER_STEP * len(groups)
        self._entries = StagedArray((max_rows, 4), torch.int32, device, copies)
        self._left: list[tuple[int, int, list[int]]] = []
        self._groups = []
        for group_id, layers, spec in groups:
            shape = layers[0].ring_shape(spec)
            memory = RingMemory(shape, len(layers), max_rows, self._slots, device)
            self._groups.append(_RingGroup(group_id, layers, memory))

    @classmethod
    def create(
        cls,
        vllm_config: VllmConfig,
        layers: Mapping[str, AttentionLayerBase],
        config: KVCacheConfig,
        device: torch.device,
        depth: int,
        uploads: Uploads | None = None,
    ) -> DeferredCommit | None:
        """None where every step commits (`CacheConfig.commit_interval` is 1). `uploads` are flushed
        between `begin_step` and the step's kernels."""
        interval = vllm_config.cache_config.commit_interval
        groups = []
        for group_id, group in enumerate(config.kv_cache_groups):
            members = [layers[name] for name in group.layer_names]
            deferring = [layer for layer in members if isinstance(layer, DefersCommit)]
            if deferring and isinstance(group.kv_cache_spec, MambaSpec):
                groups.append((group_id, deferring, group.kv_cache_spec))
        if interval == 1 or not groups:
            return None
        rows = vllm_config.scheduler_config.max_num_seqs
        deferred = cls(groups, rows, interval, device, depth, uploads)
        decisions.record(
            "deferred commit memory",
            f"{sum(t.nbytes for t in deferred.tensors) / 2**30:.2f} GiB",
            f"{interval - 1} tokens of each of --max-num-seqs {rows} requests wait in every layer",
        )
        return deferred

    @property
    def tensors(self) -> list[Tensor]:
        """The rings' memory."""
        return [tensor for group in self._groups for tensor in group.memory.tensors]

    def bind(self, tables: BlockTables) -> None:
        """Use the states that the layers have now; nothing is pending in them."""
        self.pending[:] = 0
        self._left.clear()
        self._tables = [tables.groups[group.group_id].table for group in self._groups]
        for i, group in enumerate(self._groups):
            states = [layer.kv_cache[1] for layer in group.layers]
            stack = group.memory.stack(self._steps.device, states)
            self._groups[i] = replace(group, stack=stack)
            for index, layer in enumerate(group.layers):
                layer.decode_ring = stack.layer(index)

    def unbind(self) -> None:
        """The states' memory is given up."""
        for i, group in enumerate(self._groups):
            self._groups[i] = replace(group, stack=None)
            for layer in group.layers:
                layer.decode_ring = None

    # ---- around a step -------------------------------------------------------------------------

    def leave(self, row: int) -> None:
        """A request gives up its row; its state is flushed before anything else runs."""
        if self.pending[row]:
            blocks = [int(table[row, 0]) for table in self._tables]
            self._left.append((row, int(self.pending[row]), blocks))
            self.pending[row] = 0

    def before_copies(self, copies: Sequence[BlockCopy]) -> None:
        """Flush the requests that left and the rows whose blocks are about to be copied."""
        left, self._left = self._left, []
        for i, group in enumerate(self._groups):
            sources = [copy.source for copy in copies if copy.group_id == group.group_id]
            if sources:
                mine = np.isin(self._tables[i][:, 0], sources)
                left += self._take(np.flatnonzero(mine & (self.pending > 0)))
        self._flush(left)

    def begin_step(self, order: StepOrder) -> None:
        """Flush rows that a prefill continues; tell the kernels what each decode does."""
        rows, prefills = order.rows[: order.num_decodes], order.rows[order.num_decodes :]
        self._flush(self._take(prefills[self.pending[prefills] > 0]))
        pending = self.pending[rows]
        turn = (self._step + rows) % self._interval == 0
        commits = turn | (pending == self._slots)
        steps = self._steps.next()
        steps[: len(rows), 0] = rows
        steps[: len(rows), 1] = pending
        steps[: len(rows), 2] = commits
        self._steps.upload(len(rows))
        self.pending[rows] = np.where(commits, 0, pending + 1)
        self._step += 1

    def rehearse(self) -> None:
        """Launch a flush that has nothing to write (warm-up: its kernel is compiled)."""
        for group in self._groups:
            assert group.stack is not None
            self._entries.next()[:1] = 0
            current_platform.kernels.gdn_commit(group.stack, self._entries.upload(1))

    def _take(self, rows: np.ndarray) -> list[tuple[int, int, list[int]]]:
        """What is pending in these rows; they have nothing pending any more."""
        taken = [
            (row, int(self.pending[row]), [int(table[row, 0]) for table in self._tables])
            for row in rows.tolist()
        ]
        self.pending[rows] = 0
        return taken

    def _flush(self, rows: list[tuple[int, int, list[int]]]) -> None:
        """One launch per group; made-up requests, whose block is null, have nothing to keep."""
        for i, group in enumerate(self._groups):
            real = [(row, count, blocks[i], 0) for row, count, blocks in rows if blocks[i] > 0]
            if real:
                assert group.stack is not None
                self._entries.next()[: len(real)] = real
                current_platform.kernels.gdn_commit(group.stack, self._entries.upload(len(real)))
