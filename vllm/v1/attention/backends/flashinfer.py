# SPDX-License-Identifier: Apache-2.0
"""Paged attention by FlashInfer (CUDA). Its kernels compile at first use, in tens of seconds.

FlashInfer reads our cache as it is: `(num_blocks, 2, block_size, kv_heads, head_size)` with any
block stride. Planning takes host integers only, so it never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import flashinfer
import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

_WORKSPACE_BYTES = 256 * 2**20


@dataclass
class FlashInferMetadata(AttentionMetadata):
    """Planned wrappers of one step; None where the step has no such rows."""

    num_tokens: int
    num_decodes: int
    slot_mapping: Tensor
    decode: flashinfer.BatchDecodeWithPagedKVCacheWrapper | None
    prefill: flashinfer.BatchPrefillWithPagedKVCacheWrapper | None


class _Pages(NamedTuple):
    """FlashInfer's ragged page table of some requests."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Plans decode and prefill rows of a group once per step, for all its layers."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec = spec = AttentionSpec.expect(kv_cache_spec)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        impl: FlashInferImpl = layer.impl
        self._sizes = (impl.num_heads, impl.num_kv_heads, impl.head_size, spec.block_size)
        self._options = {
            "window_left": impl.window_left,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
            "sm_scale": impl.scale,
        }
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        decodes, reqs = common.num_decodes, common.num_reqs
        if decodes:
            pages = self._pages(common, 0, decodes)
            self.decode.plan(*pages, *self._sizes, **self._options)
        if decodes < reqs:
            pages = self._pages(common, decodes, reqs)
            starts = torch.from_numpy(common.prefill_query_start_loc_cpu.copy())
            self.prefill.plan(starts, *pages, *self._sizes, causal=True, **self._options)
        return FlashInferMetadata(
            num_tokens=common.num_tokens,
            num_decodes=decodes,
            slot_mapping=common.slot_mapping,
            decode=self.decode if decodes else None,
            prefill=self.prefill if decodes < reqs else None,
        )

    def _pages(self, common: CommonAttentionMetadata, first: int, last: int) -> _Pages:
        size = self.spec.block_size
        lens = common.seq_lens_cpu[first:last].astype(np.int64)
        counts = (lens + size - 1) // size
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        columns = np.arange(int(counts.max())) < counts[:, None]
        table = common.block_table_cpu[first:last, : columns.shape[1]]
        indices = torch.from_numpy(table[columns].astype(np.int32)).pin_memory()
        last_page_len = (lens - (counts - 1) * size).astype(np.int32)
        return _Pages(
            torch.from_numpy(indptr),
            indices.to(self.device, non_blocking=True),
            torch.from_numpy(last_page_len),
        )


class FlashInferImpl:
    """Attention of one layer with this step's planned wrappers."""

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
        #: FlashInfer counts the tokens left of the query
        self.window_left = -1 if sliding_window is None else sliding_window - 1

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: FlashInferMetadata,
        out: Tensor,
        gate: Tensor | None = None,
    ) -> None:
        """`query, out, gate [tokens, num_heads, head_size]`."""
        n, end = metadata.num_decodes, metadata.num_tokens
        if metadata.decode is not None:
            metadata.decode.run(query[:n], kv_cache, out=out[:n])
        if metadata.prefill is not None:
            metadata.prefill.run(query[n:end], kv_cache, out=out[n:end])
        if gate is not None:
            real = out[:end]
            real.copy_(current_platform.kernels.mul_sigmoid(real, gate[:end]).view(real.shape))


class FlashInferBackend(AttentionBackend):
    """Needs CUDA and flashinfer-python."""

    name = "FLASHINFER"
    plans_on_host = True
    supports_sliding_window = True

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        return FlashInferMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        return FlashInferImpl
