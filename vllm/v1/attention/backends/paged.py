# SPDX-License-Identifier: Apache-2.0
"""Paged attention by the platform's own kernels (C++ on CPU, Triton on CUDA)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.kernels.attention import AttentionProblem, QueryRows
from vllm.model_executor.layers.cache_scales import CacheScales
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


@dataclass(kw_only=True)
class PagedAttentionMetadata(CommonAttentionMetadata):
    """One step of a paged group.

    `max_decode_len` is the model's bound, not the batch's: kernels size their work by it, so a
    decode's bits depend neither on its neighbours' lengths nor on graph replay.
    """

    max_decode_len: int


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Nothing to compute: the runner already has every array."""

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        longest = self.vllm_config.model_config.max_model_len
        return PagedAttentionMetadata(**vars(common), max_decode_len=longest)


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
        self.cache_scales: CacheScales | None = None
        #: set by the layer, like the scales
        self.rows = QueryRows.TOKENS
        self.sinks: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: PagedAttentionMetadata,
        out: Tensor,
        gate: Tensor | None = None,
    ) -> None:
        """`query, out, gate [tokens, num_heads, head_size]`; decode and prefill rows run
        separately."""
        decodes, tokens = metadata.num_decodes, metadata.num_tokens
        first = decodes * metadata.decode_width
        if decodes:
            self._run(
                query[:first],
                kv_cache,
                metadata.block_table[:decodes],
                metadata.seq_lens[:decodes],
                metadata.query_start_loc[: decodes + 1],
                out[:first],
                None if gate is None else gate[:first],
                max_query_len=metadata.decode_width,
                max_seq_len=metadata.max_decode_len,
            )
        if decodes < metadata.num_reqs:
            longest = metadata.max_query_len
            self._run(
                query[first:tokens],
                kv_cache,
                metadata.prefill_block_table,
                metadata.prefill_seq_lens,
                metadata.prefill_query_start_loc,
                out[first:tokens],
                None if gate is None else gate[first:tokens],
                max_query_len=longest,
                max_seq_len=metadata.max_decode_len if longest == 1 else metadata.max_seq_len,
            )

    def _run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        out: Tensor,
        gate: Tensor | None,
        *,
        max_query_len: int,
        max_seq_len: int,
    ) -> None:
        scales = self.cache_scales
        problem = AttentionProblem(
            query,
            kv_cache,
            block_table,
            seq_lens,
            query_start_loc,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            scale=self.scale,
            sliding_window=self.sliding_window,
            out=out,
            k_scale=1.0 if scales is None else scales.k,
            v_scale=1.0 if scales is None else scales.v,
            gate=gate,
            rows=self.rows,
            sinks=self.sinks,
        )
        self.kernels.paged_attention(problem)


class PagedAttentionBackend(AttentionBackend):
    """Works for every head size and both platforms."""

    name = "PAGED"
    supports_full_graph = True
    supports_fp8_cache = True
    supports_sinks = True

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl
