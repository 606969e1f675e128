# SPDX-License-Identifier: Apache-2.0
"""What the layers see of a step: one metadata object per state group, for steps and captures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.step_inputs import StepInputs


@dataclass(frozen=True)
class StateGroup:
    """One group of layers that share a spec, with its metadata builder; None for a group whose
    layers are all on other pipeline stages."""

    layer_names: list[str]
    spec: KVCacheSpec
    builder: AttentionMetadataBuilder[Any] | None


@dataclass(frozen=True)
class _Batch:
    """Host integers of a batch. `num_tokens` are real, or stand for decodes that are captured."""

    num_reqs: int
    num_decodes: int
    width: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_computed: np.ndarray


@dataclass(frozen=True)
class _GroupTables:
    """What a group's block table uploaded for a step."""

    block_table: Tensor
    block_table_cpu: np.ndarray
    prefill_block_table: Tensor
    decode_blocks: Tensor
    slot_mapping: Tensor


_NOTHING = np.zeros(0, dtype=np.int64)


class StepMetadata:
    """Makes forward contexts; with the layers' metadata all that waits for upload is queued."""

    def __init__(
        self,
        groups: list[StateGroup],
        tables: BlockTables,
        layers: dict[str, AttentionLayerBase],
        max_model_len: int,
    ) -> None:
        self._groups = groups
        self._tables = tables
        self._layers = layers
        self._max_model_len = max_model_len

    def of_step(
        self, order: StepOrder, inputs: StepInputs, only: Collection[str] | None = None
    ) -> ForwardContext:
        """The context of a step; metadata for the groups of `only` these layers (None: all),
        which is less work where the others run inside a graph."""
        batch = _Batch(
            order.num_reqs,
            order.num_decodes,
            inputs.width,
            inputs.num_tokens,
            int(order.lengths.max()),
            int(inputs.seq_lens_cpu.max()),
            order.num_computed,
        )
        padded_reqs = len(inputs.seq_lens)
        uploaded = [
            _GroupTables(
                *table.gather(order.rows, padded_reqs, order.num_decodes, batch.max_seq_len),
                table.decode_blocks(order.rows[: order.num_decodes], inputs.num_decode_rows),
                table.slots[: inputs.num_padded],
            )
            for table in self._tables.groups
        ]
        return self._context(batch, inputs, uploaded, only)

    def of_padding(self, inputs: StepInputs) -> ForwardContext:
        """The context of a capture: as many decodes as `inputs` has rows, of any length, and every
        row padding. Without rows, a batch of no requests."""
        num_reqs, width = len(inputs.seq_lens), inputs.width
        longest = self._max_model_len
        batch = _Batch(num_reqs, num_reqs, width, num_reqs * width, width, longest, _NOTHING)
        uploaded = [
            _GroupTables(
                *table.padding(num_reqs),
                table.decode_blocks(_NOTHING, inputs.num_decode_rows),
                table.slots[: inputs.num_padded],
            )
            for table in self._tables.groups
        ]
        return self._context(batch, inputs, uploaded, None)

    def of_draft_tokens(
        self,
        layer_names: Collection[str],
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slots: Mapping[int, Tensor],
        blocks: Mapping[int, Tensor],
        width: int,
    ) -> ForwardContext:
        """The context in which a drafter's layers run `width` more tokens of each of the step's
        first requests, all of them decodes: `query_start_loc [n + 1]` and `seq_lens [n]` int32, and
        by group `slots [n * width]` or, of recurrent ones, `blocks [n]` int32, are on the device.
        The host knows no length.
        """
        count, longest = len(seq_lens), self._max_model_len
        none = seq_lens[:0]
        context = ForwardContext(
            self._layers, {}, num_tokens=count * width, only_decodes=True, decode_width=width
        )
        for index, states in blocks.items():
            for name in set(self._groups[index].layer_names).intersection(layer_names):
                context.decode_blocks[name] = states
        for index, places in slots.items():
            group, table = self._groups[index], self._tables.groups[index]
            assert group.builder is not None, "drafters need one pipeline stage"
            metadata = group.builder.build(
                CommonAttentionMetadata(
                    num_reqs=count,
                    num_tokens=count * width,
                    num_decodes=count,
                    decode_width=width,
                    max_query_len=width,
                    max_seq_len=longest,
                    query_start_loc=query_start_loc,
                    query_start_loc_cpu=np.arange(count + 1, dtype=np.int32) * width,
                    seq_lens=seq_lens,
                    seq_lens_cpu=np.full(count, longest),
                    num_computed_tokens_cpu=np.full(count, longest - width),
                    prefill_query_start_loc=none,
                    prefill_query_start_loc_cpu=_NOTHING,
                    block_table=table.staged.device[:count],
                    prefill_seq_lens=none,
                    prefill_block_table=none,
                    slot_mapping=places,
                    block_table_cpu=table.staged.array[:count],
                )
            )
            for name in set(group.layer_names).intersection(layer_names):
                context.attn_metadata[name] = metadata
                context.slot_mapping[name] = places
        return context

    def _context(
        self,
        batch: _Batch,
        inputs: StepInputs,
        uploaded: list[_GroupTables],
        only: Collection[str] | None,
    ) -> ForwardContext:
        context = ForwardContext(
            no_compile_layers=self._layers,
            attn_metadata={},
            num_tokens=batch.num_tokens,
            only_decodes=0 < batch.num_reqs == batch.num_decodes,
            decode_width=batch.width,
        )
        for group, tables in zip(self._groups, uploaded, strict=True):
            if group.builder is None:
                continue
            if only is None or not set(only).isdisjoint(group.layer_names):
                self._add(context, group, group.builder, batch, inputs, tables)
        self._tables.flush()
        return context

    @staticmethod
    def _add(
        context: ForwardContext,
        group: StateGroup,
        builder: AttentionMetadataBuilder[Any],
        batch: _Batch,
        inputs: StepInputs,
        tables: _GroupTables,
    ) -> None:
        metadata = builder.build(
            CommonAttentionMetadata(
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                num_decodes=batch.num_decodes,
                decode_width=batch.width,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
                query_start_loc=inputs.query_start_loc,
                query_start_loc_cpu=inputs.query_start_loc_cpu,
                seq_lens=inputs.seq_lens,
                seq_lens_cpu=inputs.seq_lens_cpu,
                num_computed_tokens_cpu=batch.num_computed,
                prefill_query_start_loc=inputs.prefill_query_start_loc,
                prefill_query_start_loc_cpu=inputs.prefill_query_start_loc_cpu,
                block_table=tables.block_table,
                prefill_seq_lens=inputs.prefill_seq_lens,
                prefill_block_table=tables.prefill_block_table,
                slot_mapping=tables.slot_mapping,
                block_table_cpu=tables.block_table_cpu,
                padded_tokens=inputs.num_padded if inputs.replays else None,
            )
        )
        where, places = context.slot_mapping, tables.slot_mapping
        if group.spec.is_recurrent:
            where, places = context.decode_blocks, tables.decode_blocks
        for name in group.layer_names:
            context.attn_metadata[name] = metadata
            where[name] = places
