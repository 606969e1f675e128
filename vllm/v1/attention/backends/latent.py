# SPDX-License-Identifier: Apache-2.0
"""Latent attention by the platform's own kernels (torch and C++ on CPU, Triton on CUDA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from torch import Tensor

from vllm.kernels.latent_attention import LatentAttentionProblem, expansion_pays
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.paged import PagedAttentionMetadata


@dataclass(frozen=True)
class PrefillRun:
    """Neighbouring prefills `[first, last)` that are one launch; their tokens are `[start, end)` of
    the prefills'. Host integers."""

    first: int
    last: int
    start: int
    end: int
    max_query_len: int
    max_seq_len: int


@dataclass(kw_only=True)
class LatentAttentionMetadata(PagedAttentionMetadata):
    """One step of a group of latent attention. `prefill_lens`: query and context of each prefill,
    on the host."""

    prefill_lens: list[tuple[int, int]]

    def prefill_runs(self, is_long: Callable[[int], bool]) -> list[PrefillRun]:
        """The prefills in their order: those of a long query alone, others with their neighbours.

        What a sequence is computed by so follows from its own length, not from the batch.
        """
        runs: list[PrefillRun] = []
        first = start = 0
        pairs = enumerate(self.prefill_lens)
        for _, group in groupby(pairs, key=lambda p: p[0] if is_long(p[1][0]) else -1):
            lens = [pair for _, pair in group]
            end = start + sum(query for query, _ in lens)
            longest = max(query for query, _ in lens), max(context for _, context in lens)
            runs.append(PrefillRun(first, first + len(lens), start, end, *longest))
            first, start = first + len(lens), end
        return runs


class LatentAttentionMetadataBuilder(AttentionMetadataBuilder[LatentAttentionMetadata]):
    """Nothing to compute: the runner already has every array."""

    def build(self, common: CommonAttentionMetadata) -> LatentAttentionMetadata:
        decodes, reqs = common.num_decodes, common.num_reqs
        starts = common.prefill_query_start_loc_cpu[: reqs - decodes + 1].tolist()
        queries = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        contexts = common.seq_lens_cpu[decodes:reqs].tolist()
        return LatentAttentionMetadata(
            **vars(common),
            max_decode_len=self.vllm_config.model_config.max_model_len,
            prefill_lens=list(zip(queries, contexts, strict=True)),
        )


@dataclass(eq=False)
class LatentAttentionImpl:
    """Attention of one layer; the rows of this step are already in the cache.

    `room`: see `LatentAttentionProblem`; that of a step's own tokens, so that a cached context
    takes no more memory than the largest step without one.
    """

    scale: float
    room: int

    def forward(
        self,
        query: Tensor,
        kv_b: Tensor,
        cache: Tensor,
        metadata: LatentAttentionMetadata,
        out: Tensor,
    ) -> None:
        """`query [tokens, heads, nope + shared]`, `kv_b [heads, nope + value, latent]`,
        `out [tokens, heads, value]`; decode and prefill rows run separately."""
        m = metadata
        first = m.num_decodes * m.decode_width
        make = partial(
            LatentAttentionProblem, kv_b=kv_b, cache=cache, scale=self.scale, room=self.room
        )
        if m.num_decodes:
            problem = make(
                query[:first],
                block_table=m.block_table[: m.num_decodes],
                seq_lens=m.seq_lens[: m.num_decodes],
                query_start_loc=m.query_start_loc[: m.num_decodes + 1],
                max_query_len=m.decode_width,
                max_seq_len=m.max_decode_len,
                out=out[:first],
            )
            current_platform.kernels.latent_attention(problem)
        nope = query.shape[2] - (cache.shape[2] - kv_b.shape[2])
        is_long = partial(
            expansion_pays, latent=kv_b.shape[2], nope=nope, value=kv_b.shape[1] - nope
        )
        for run in m.prefill_runs(is_long):
            sequences = slice(run.first, run.last)
            starts = m.prefill_query_start_loc[run.first : run.last + 1]
            tokens = slice(first + run.start, first + run.end)
            problem = make(
                query[tokens],
                block_table=m.prefill_block_table[sequences],
                seq_lens=m.prefill_seq_lens[sequences],
                query_start_loc=starts - run.start if run.start else starts,
                max_query_len=run.max_query_len,
                max_seq_len=m.max_decode_len if run.max_query_len == 1 else run.max_seq_len,
                out=out[tokens],
            )
            current_platform.kernels.latent_attention(problem)


class LatentAttentionBackend(AttentionBackend):
    """Rows of a latent and the shared key dimensions, for both platforms."""

    name = "LATENT"
    supports_full_graph = True

    @staticmethod
    def get_builder_cls() -> type[LatentAttentionMetadataBuilder]:
        return LatentAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        return LatentAttentionImpl
