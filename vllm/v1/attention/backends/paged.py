# SPDX-License-Identifier: Apache-2.0
"""Paged attention by the platform's own kernels (C++ on CPU, Triton on CUDA)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """One step of a paged group; decodes first (see `CommonAttentionMetadata`).

    `max_decode_len` is the model's bound, not the batch's: kernels size their work by it, so a
    decode's bits depend neither on its neighbours' lengths nor on graph replay.
    """

    num_tokens: int
    num_reqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    max_decode_len: int
    query_start_loc: Tensor
    prefill_query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Nothing to compute: the runner already has every array."""

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        return PagedAttentionMetadata(
            num_tokens=common.num_tokens,
            num_reqs=common.num_reqs,
            num_decodes=common.num_decodes,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            max_decode_len=self.vllm_config.model_config.max_model_len,
            query_start_loc=common.query_start_loc,
            prefill_query_start_loc=common.prefill_query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
        )


class PagedAttentionImpl:
    """Attention of one layer; the keys and values of this step are already in the cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        sliding_window: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        self.kernels = current_platform.kernels

    def forward(
        self, query: Tensor, kv_cache: Tensor, metadata: PagedAttentionMetadata, out: Tensor
    ) -> None:
        """`query, out [tokens, num_heads, head_size]`; decode and prefill rows run separately."""
        decodes = metadata.num_decodes
        if decodes:
            self._run(query, kv_cache, metadata, out, 0, decodes, metadata.query_start_loc, 1)
        if decodes < metadata.num_reqs:
            self._run(
                query,
                kv_cache,
                metadata,
                out,
                decodes,
                metadata.num_reqs,
                metadata.prefill_query_start_loc,
                metadata.max_query_len,
            )

    def _run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: PagedAttentionMetadata,
        out: Tensor,
        first: int,
        last: int,
        query_start_loc: Tensor,
        max_query_len: int,
    ) -> None:
        # A decode is one token, so request `first` starts at token `first`.
        tokens = slice(first, last if max_query_len == 1 and first == 0 else metadata.num_tokens)
        self.kernels.paged_attention(
            query[tokens],
            kv_cache,
            metadata.block_table[first:last],
            metadata.seq_lens[first:last],
            query_start_loc[: last - first + 1],
            max_query_len=max_query_len,
            max_seq_len=metadata.max_decode_len if max_query_len == 1 else metadata.max_seq_len,
            scale=self.scale,
            sliding_window=self.sliding_window,
            out=out[tokens],
        )


class PagedAttentionBackend(AttentionBackend):
    """Works for every head size and both platforms."""

    name = "PAGED"
    supports_full_graph = True

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
