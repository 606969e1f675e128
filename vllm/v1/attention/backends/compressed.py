# SPDX-License-Identifier: Apache-2.0
"""Attention over a window and compressed entries: one metadata object per cache of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


@dataclass(frozen=True)
class TokenRun:
    """Sequences with equally many of the step's `tokens`, and their `block_table [num_seqs,
    blocks]` int32."""

    tokens: slice
    block_table: Tensor


@dataclass(kw_only=True)
class CompressedAttentionMetadata(CommonAttentionMetadata):
    """`runs`: the step's decodes together, then each prefill by itself; the same in every group."""

    runs: list[TokenRun]


class CompressedAttentionMetadataBuilder(AttentionMetadataBuilder[CompressedAttentionMetadata]):
    """A prefill's table is as wide as its own blocks: its bits do not depend on the batch."""

    def build(self, common: CommonAttentionMetadata) -> CompressedAttentionMetadata:
        decodes, start = common.num_decodes, common.num_decode_tokens
        runs = []
        if decodes:
            runs.append(TokenRun(slice(0, start), common.block_table[:decodes]))
        ends = common.prefill_query_start_loc_cpu[1 : common.num_reqs - decodes + 1].tolist()
        contexts = common.seq_lens_cpu[decodes : common.num_reqs].tolist()
        first = start
        for i, (end, context) in enumerate(zip(ends, contexts, strict=True)):
            blocks = self.kv_cache_spec.blocks_for(context)
            table = common.prefill_block_table[i : i + 1, :blocks]
            runs.append(TokenRun(slice(first, start + end), table))
            first = start + end
        return CompressedAttentionMetadata(**vars(common), runs=runs)


class CompressedAttentionBackend(AttentionBackend):
    """Rows of a window, compressed entries and what they are made of, for both platforms."""

    name = "COMPRESSED"
    supports_full_graph = True

    @staticmethod
    def get_builder_cls() -> type[CompressedAttentionMetadataBuilder]:
        return CompressedAttentionMetadataBuilder
