# SPDX-License-Identifier: Apache-2.0
"""Batch metadata of gated-delta-net layers (and any other slot-indexed recurrent state)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.kernels.chunks import CHUNK, fill_chunks
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import ScanCuts, ScanSegments
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaAttentionBackendEnum, MambaSpec
from vllm.v1.worker.staging import StagedArray, Uploads

#: more than the steps in flight
_DEPTH = 3
#: most prefills of a step that replays a graph: each costs the kernels a little, even if absent
MAX_PREFILLS = 16


@dataclass(frozen=True)
class PrefillBatch:
    """What the prefill kernels of a layer are given, of its tokens in `rows`; see
    `GdnPrefill`.

    A step that replays a graph has all its tokens in `rows` and arrays of `MAX_PREFILLS` + 1
    sequences, the last and maybe others empty and without a block, at fixed addresses. Else `rows`
    are the prefills' and the arrays theirs alone.
    """

    rows: slice
    state_indices: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    segments: ScanSegments | None = None

    @property
    def is_empty(self) -> bool:
        return self.state_indices.shape[0] == 0


@dataclass(kw_only=True)
class GDNAttentionMetadata(CommonAttentionMetadata):
    """One step of a recurrent group. `batch`: its prefills, as layers run them; its decodes are in
    `ForwardContext.decode_blocks`."""

    batch: PrefillBatch


class GDNAttentionMetadataBuilder(AttentionMetadataBuilder[GDNAttentionMetadata]):
    """Chunk indices and segments come from host lengths, once per step for all layers."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        splits = vllm_config.cache_config.splits_scans
        self._cuts = _cuts_for(MambaSpec.expect(kv_cache_spec), device) if splits else None
        scheduler = vllm_config.scheduler_config
        rows = max(scheduler.max_num_seqs, MAX_PREFILLS + 1)
        chunks = scheduler.max_num_batched_tokens // CHUNK + rows
        # Whole words: see `Uploads.add`.
        self._initial = StagedArray((cdiv(rows, 4) * 4,), torch.bool, device, _DEPTH)
        self._chunks = StagedArray((chunks, 2), torch.int32, device, _DEPTH)
        self._offsets = StagedArray((rows + 1,), torch.int32, device, _DEPTH)
        self._starts = StagedArray((MAX_PREFILLS + 2,), torch.int32, device, _DEPTH)
        self._blocks = StagedArray((MAX_PREFILLS + 1,), torch.int32, device, _DEPTH)

    def share_uploads(self, uploads: Uploads) -> None:
        for array in (self._initial, self._chunks, self._offsets, self._starts, self._blocks):
            array.uploads = uploads

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        """RuntimeError for more prefills than a graph holds in a step that replays one."""
        decodes, reqs = common.num_decodes, common.num_reqs
        prefills, padded = reqs - decodes, common.padded_tokens
        seqs, chunks = prefills, 0
        if padded is not None:
            if prefills > MAX_PREFILLS:
                raise RuntimeError(f"{prefills} prefills in a graph for {MAX_PREFILLS}")
            seqs, chunks = MAX_PREFILLS + 1, padded // CHUNK + MAX_PREFILLS
        initial = self._initial.next()
        np.greater(common.num_computed_tokens_cpu[decodes:reqs], 0, initial[:prefills])
        initial[prefills:seqs] = False
        starts = common.prefill_query_start_loc_cpu
        num_chunks = fill_chunks(
            starts, self._chunks.next(), self._offsets.next(), num_seqs=seqs, num_chunks=chunks
        )
        has_initial_state = self._initial.upload(seqs)
        chunk_indices = self._chunks.upload(max(chunks, num_chunks), 2)
        chunk_offsets = self._offsets.upload(seqs + 1)
        if padded is not None:
            self._fill_sequences(common, prefills)
            batch = PrefillBatch(
                slice(0, padded),
                self._blocks.upload(seqs),
                has_initial_state,
                self._starts.upload(seqs + 1),
                chunk_indices,
                chunk_offsets,
            )
        else:
            batch = PrefillBatch(
                slice(common.num_decode_tokens, common.num_tokens),
                common.prefill_block_table[:, 0],
                has_initial_state,
                common.prefill_query_start_loc,
                chunk_indices,
                chunk_offsets,
                self._cuts.of_batch(starts.tolist(), self.device) if self._cuts else None,
            )
        return GDNAttentionMetadata(**vars(common), batch=batch)

    def _fill_sequences(self, common: CommonAttentionMetadata, prefills: int) -> None:
        """Blocks and absolute starts of the prefills, then of sequences that are absent."""
        decodes, blocks, starts = common.num_decodes, self._blocks.next(), self._starts.next()
        blocks[:prefills] = common.block_table_cpu[decodes : decodes + prefills, 0]
        blocks[prefills:] = -1
        starts[: prefills + 1] = common.prefill_query_start_loc_cpu + common.num_decode_tokens
        starts[prefills + 1 :] = starts[prefills]


def _cuts_for(spec: MambaSpec, device: torch.device) -> ScanCuts | None:
    """None for a kind whose kernels scan sequences whole."""
    if spec.mamba_type is not MambaAttentionBackendEnum.GDN_ATTN:
        return None
    from vllm.kernels.triton.configs import device_configs

    _, (heads, head_v_dim, _) = spec.shapes
    return ScanCuts(heads, head_v_dim, device_configs(device).multiprocessors)


class GDNAttentionBackend(AttentionBackend):
    """Recurrent state by block id; the layer calls the platform's kernels itself."""

    name = "GDN_ATTN"
    supports_full_graph = True
    max_prefills_in_graph = MAX_PREFILLS

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return GDNAttentionMetadataBuilder
