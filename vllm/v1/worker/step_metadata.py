# SPDX-License-Identifier: Apache-2.0
"""What the layers see of a step: one metadata object per state group, for steps and captures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.block_tables import BlockTables, GroupBlockTable
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.step_inputs import StepInputs


@dataclass(frozen=True)
class StateGroup:
    """One group of layers that share a spec, with its metadata builder; None for a group whose
    layers are all on other pipeline stages."""

    layer_names: list[str]
    spec: KVCacheSpec
    builder: AttentionMetadataBuilder[Any] | None

    def build(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        """The metadata of a group with layers here; TypeError for a builder that gives none."""
        assert self.builder is not None, "the group's layers are on other pipeline stages"
        metadata = self.builder.build(common)
        if not isinstance(metadata, AttentionMetadata):
            raise TypeError(
                f"{type(self.builder).__name__}.build returned {type(metadata).__name__}; it has "
                "to return an AttentionMetadata"
            )
        return metadata


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
        longest, padded_reqs = int(inputs.seq_lens_cpu.max()), len(inputs.seq_lens)
        make = partial(
            CommonAttentionMetadata,
            num_reqs=order.num_reqs,
            num_tokens=inputs.num_tokens,
            num_decodes=order.num_decodes,
            max_query_len=int(order.lengths.max()),
            max_seq_len=longest,
            num_computed_tokens_cpu=order.num_computed,
        )
        context = ForwardContext(
            self._layers,
            {},
            num_tokens=inputs.num_tokens,
            only_decodes=order.num_reqs == order.num_decodes,
            decode_width=inputs.width,
            exchange_rows=inputs.num_padded,
        )
        for group, table in zip(self._groups, self._tables.groups, strict=True):
            gathered = table.gather(order.rows, padded_reqs, order.num_decodes, longest)
            blocks = table.decode_blocks(order.rows[: order.num_decodes], inputs.num_decode_rows)
            if only is None or not set(only).isdisjoint(group.layer_names):
                _add(context, group, make, inputs, table, gathered, blocks)
        self._tables.flush()
        return context

    def of_padding(self, inputs: StepInputs) -> ForwardContext:
        """The context of a capture: as many decodes as `inputs` has rows, of any length, and every
        row padding. Without rows, a batch of no requests."""
        num_reqs, width = len(inputs.seq_lens), inputs.width
        make = partial(
            CommonAttentionMetadata,
            num_reqs=num_reqs,
            num_tokens=num_reqs * width,
            num_decodes=num_reqs,
            max_query_len=width,
            max_seq_len=self._max_model_len,
            num_computed_tokens_cpu=_NOTHING,
        )
        context = ForwardContext(
            self._layers,
            {},
            num_tokens=num_reqs * width,
            only_decodes=num_reqs > 0,
            decode_width=width,
            exchange_rows=inputs.num_padded,
        )
        for group, table in zip(self._groups, self._tables.groups, strict=True):
            blocks = table.decode_blocks(_NOTHING, inputs.num_decode_rows)
            _add(context, group, make, inputs, table, table.padding(num_reqs), blocks)
        self._tables.flush()
        return context

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
            metadata = group.build(
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


def _add(
    context: ForwardContext,
    group: StateGroup,
    make: Callable[..., CommonAttentionMetadata],
    inputs: StepInputs,
    table: GroupBlockTable,
    gathered: tuple[Tensor, np.ndarray, Tensor],
    decode_blocks: Tensor,
) -> None:
    """Put a group's metadata into the context: `make` knows of the batch, `gathered` is what its
    block table uploaded."""
    if group.builder is None:
        return
    block_table, block_table_cpu, prefill_block_table = gathered
    slots = table.slots[: inputs.num_padded]
    metadata = group.build(
        make(
            query_start_loc=inputs.query_start_loc,
            query_start_loc_cpu=inputs.query_start_loc_cpu,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=inputs.seq_lens_cpu,
            prefill_query_start_loc=inputs.prefill_query_start_loc,
            prefill_query_start_loc_cpu=inputs.prefill_query_start_loc_cpu,
            block_table=block_table,
            prefill_seq_lens=inputs.prefill_seq_lens,
            prefill_block_table=prefill_block_table,
            slot_mapping=slots,
            block_table_cpu=block_table_cpu,
            padded_tokens=inputs.num_padded if inputs.replays else None,
            decode_width=inputs.width,
        )
    )
    where, places = context.slot_mapping, slots
    if group.spec.is_recurrent:
        where, places = context.decode_blocks, decode_blocks
    for name in group.layer_names:
        context.attn_metadata[name] = metadata
        where[name] = places
