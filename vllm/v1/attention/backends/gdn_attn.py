# SPDX-License-Identifier: Apache-2.0
"""Batch metadata of gated-delta-net layers (and any other slot-indexed recurrent state)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.interface import chunk_metadata
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


@dataclass
class GDNAttentionMetadata(AttentionMetadata):
    """One step of a recurrent group.

    Tokens `[0, num_decodes)` are one decode each; `[num_decodes, num_tokens)` are prefills.
    `state_indices [num_reqs]` int32 (decodes first), the prefills' part of it again in
    `prefill_state_indices [num_prefills]`, `has_initial_state [num_prefills]` bool,
    `prefill_query_start_loc [num_prefills + 1]` int32 relative to the first prefill token;
    `chunk_indices`, `chunk_offsets`: see `Kernels.gdn_prefill`.
    """

    num_tokens: int
    num_decodes: int
    num_prefills: int
    state_indices: Tensor
    prefill_state_indices: Tensor
    has_initial_state: Tensor
    prefill_query_start_loc: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes


class GDNAttentionMetadataBuilder(AttentionMetadataBuilder[GDNAttentionMetadata]):
    """Chunk indices come from host lengths, once per step for all layers."""

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        decodes, reqs = common.num_decodes, common.num_reqs
        indices, offsets = chunk_metadata(common.prefill_query_start_loc_cpu.tolist())
        has_initial = torch.from_numpy(np.asarray(common.num_computed_tokens_cpu[decodes:reqs] > 0))
        return GDNAttentionMetadata(
            num_tokens=common.num_tokens,
            num_decodes=decodes,
            num_prefills=reqs - decodes,
            state_indices=common.block_table[:, 0],
            prefill_state_indices=common.prefill_block_table[:, 0],
            has_initial_state=self._upload(has_initial),
            prefill_query_start_loc=common.prefill_query_start_loc,
            chunk_indices=self._upload(indices),
            chunk_offsets=self._upload(offsets),
        )

    def _upload(self, host: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


class GDNAttentionBackend(AttentionBackend):
    """Recurrent state by block id; the layer calls the platform's kernels itself."""

    name = "GDN_ATTN"
    supports_full_graph = True

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return GDNAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        raise ValueError("recurrent state has the shapes its MambaSpec names, not a paged shape")
