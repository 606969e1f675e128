# SPDX-License-Identifier: Apache-2.0
"""Paged attention by the platform's own kernels (C++ on CPU, Triton on CUDA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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


@dataclass(eq=False)
class PagedAttentionImpl:
    """Attention of one layer; the keys and values of this step are already in the cache.

    The layer sets `cache_scales`, `rows` and `sinks`.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    sliding_window: int | None = None
    cache_scales: CacheScales | None = None
    rows: QueryRows = QueryRows.TOKENS
    sinks: Tensor | None = None

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
        m, scales = metadata, self.cache_scales
        decodes = slice(0, m.num_decodes * m.decode_width)
        prefills = slice(decodes.stop, m.num_tokens)
        make = partial(
            AttentionProblem,
            kv_cache=kv_cache,
            scale=self.scale,
            sliding_window=self.sliding_window,
            k_scale=1.0 if scales is None else scales.k,
            v_scale=1.0 if scales is None else scales.v,
            rows=self.rows,
            sinks=self.sinks,
        )
        if m.num_decodes:
            problem = make(
                query[decodes],
                block_table=m.block_table[: m.num_decodes],
                seq_lens=m.seq_lens[: m.num_decodes],
                query_start_loc=m.query_start_loc[: m.num_decodes + 1],
                max_query_len=m.decode_width,
                max_seq_len=m.max_decode_len,
                out=out[decodes],
                gate=None if gate is None else gate[decodes],
            )
            current_platform.kernels.paged_attention(problem)
        if m.num_decodes < m.num_reqs:
            problem = make(
                query[prefills],
                block_table=m.prefill_block_table,
                seq_lens=m.prefill_seq_lens,
                query_start_loc=m.prefill_query_start_loc,
                max_query_len=m.max_query_len,
                max_seq_len=m.max_decode_len if m.max_query_len == 1 else m.max_seq_len,
                out=out[prefills],
                gate=None if gate is None else gate[prefills],
            )
            current_platform.kernels.paged_attention(problem)


class PagedAttentionBackend(AttentionBackend):
    """Works for every head size and both platforms."""

    name = "PAGED"
    supports_full_graph = True
    supports_fp8_cache = True
    supports_sinks = True
    supports_sliding_window = True
    supports_row_blocks = True

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl
