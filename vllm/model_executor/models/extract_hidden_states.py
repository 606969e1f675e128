# SPDX-License-Identifier: Apache-2.0
"""The "draft model" of hidden-state extraction: one layer that only writes its cache."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import (
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


def aux_layer_ids(vllm_config: VllmConfig) -> tuple[int, ...]:
    """The captured layers, as configured; ValueError when there are none."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None:
        raise ValueError("hidden-state extraction needs speculative_config.draft_model_config")
    ids = draft.hf_config.eagle_aux_hidden_state_layer_ids
    if not ids:
        raise ValueError(
            "eagle_aux_hidden_state_layer_ids must be set in "
            "speculative_config.draft_model_config.hf_config"
        )
    return tuple(ids)


def basic_cache(to_cache: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `to_cache [tokens, columns, hidden]` to `kv_cache [num_blocks, block_size, columns,
    hidden]` at `slot_mapping [tokens]`; negative slots are skipped."""
    current_platform.kernels.write_rows(to_cache, kv_cache, slot_mapping)


@dataclass
class CacheOnlyAttentionMetadata(AttentionMetadata):
    """`slot_mapping [tokens]` int64."""

    slot_mapping: Tensor


class CacheOnlyAttentionMetadataBuilder(AttentionMetadataBuilder[CacheOnlyAttentionMetadata]):
    """The slots are all there is."""

    def build(self, common: CommonAttentionMetadata) -> CacheOnlyAttentionMetadata:
        return CacheOnlyAttentionMetadata(slot_mapping=common.slot_mapping)


class CacheOnlyAttentionImpl:
    """Writes rows; attends to nothing."""

    def forward(self, rows: Tensor, kv_cache: Tensor, metadata: CacheOnlyAttentionMetadata) -> None:
        """`rows [tokens, columns, hidden]`; rows past the slots are graph padding."""
        slots = metadata.slot_mapping
        basic_cache(rows[: slots.shape[0]], kv_cache, slots)


class CacheOnlyAttentionBackend(AttentionBackend):
    """One masked scatter: fits into any captured graph."""

    name = "CACHE_ONLY"
    supports_full_graph = True

    @staticmethod
    def get_builder_cls() -> type[CacheOnlyAttentionMetadataBuilder]:
        return CacheOnlyAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[CacheOnlyAttentionImpl]:
        return CacheOnlyAttentionImpl


class CacheOnlyAttentionLayer(nn.Module, AttentionLayerBase):
    """Keeps `num_heads` rows of `head_size` elements per token, in the model's dtype."""

    reads_fixed_addresses = True

    def __init__(self, num_heads: int, head_size: int, prefix: str = "") -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.impl = CacheOnlyAttentionImpl()
        self.layer_name = prefix

    def forward(self, to_cache: Tensor) -> Tensor:
        """Cache `to_cache [tokens, num_heads, head_size]` at this step's slots; returns it."""
        metadata = self.metadata()
        maybe_wait_for_layer_load(self.layer_name)
        self.impl.forward(to_cache, self.kv_cache, metadata)
        maybe_save_kv_layer(self.layer_name, self.kv_cache, metadata)
        return to_cache

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheOnlyAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> HiddenStateCacheSpec:
        assert vllm_config.model_config is not None
        # The rows are exact whatever dtype the attention cache is quantised to.
        return HiddenStateCacheSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            dtype=vllm_config.model_config.dtype,
        )


class ExtractHiddenStatesModel(nn.Module):
    """One `CacheOnlyAttentionLayer`, numbered as if it followed the target's layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        assert model_config is not None
        index = str(model_config.get_num_layers(vllm_config.parallel_config))
        name = f"cache_only_layers.{index}"
        layer = CacheOnlyAttentionLayer(
            num_heads=len(aux_layer_ids(vllm_config)),
            head_size=model_config.get_hidden_size(),
            prefix=f"{prefix}.{name}" if prefix else name,
        )
        self.cache_only_layers = nn.ModuleDict({index: layer})

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states [tokens, columns, hidden]`, returned as given."""
        for layer in self.cache_only_layers.values():
            hidden_states = layer(hidden_states)
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """There are none."""
        return set()
