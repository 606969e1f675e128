# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (arXiv 2412.06464) as in Qwen3.5: convolution, gated delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from vllm.distributed.kv_transfer.layer_hooks import (
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.distributed.utils import divide
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    resolve_tp,
)
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.parameter import (
    Section,
    empty_parameter,
    load_sections,
    local_size,
    sections_loader,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum, MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class GatedDeltaNetShape:
    """Sizes of the whole layer, before sharding."""

    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int
    eps: float

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    def state_shape(self, tp_size: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See `MambaStateShapeCalculator`."""
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp_size,
            self.num_k_heads,
            self.num_v_heads,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
        )


class ShortConvolution(nn.Module):
    """The depthwise convolution's `weight [channels, width]`, sharded per q, k and v section."""

    def __init__(self, sections: tuple[Section, ...], width: int) -> None:
        super().__init__()
        self.sections = sections
        self.weight = empty_parameter(local_size(sections), width)
        bound = width**-0.5
        set_weight_attrs(
            self.weight, {"weight_loader": self.weight_loader, "dummy_range": (-bound, bound)}
        )

    def weight_loader(self, param: Tensor, loaded: Tensor) -> None:
        """`loaded [channels, 1, width]` as torch's Conv1d stores it."""
        flat = loaded.squeeze(1) if loaded.dim() == 3 else loaded
        load_sections(param, flat, sections=self.sections)


class GatedDeltaNet(nn.Module, AttentionLayerBase):
    """Recurrent token mixer; keeps the convolution's last inputs and a matrix per head.

    `in_proj` fuses q, k, v, z, b, a (shard ids 0 to 5): `CHECKPOINT_NAMES` maps the tensors of a
    Qwen3.5 checkpoint onto it. Decode rows (first in the batch) take the fused recurrent step,
    prefill rows the chunked form.
    """

    CHECKPOINT_NAMES: ClassVar[tuple[tuple[str, str, int | tuple[int, ...]], ...]] = (
        ("in_proj", "in_proj_qkv", (0, 1, 2)),
        ("in_proj", "in_proj_z", 3),
        ("in_proj", "in_proj_b", 4),
        ("in_proj", "in_proj_a", 5),
    )

    def __init__(
        self,
        shape: GatedDeltaNetShape,
        prefix: str = "",
        *,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        super().__init__()
        rank, size = resolve_tp(tp_rank, tp_size, disable_tp=False)
        self.shape = shape
        self.tp_size = size
        self.num_k_heads = divide(shape.num_k_heads, size)
        self.num_v_heads = divide(shape.num_v_heads, size)
        key_dim, value_dim = shape.key_dim, shape.value_dim
        self.conv_dim = divide(2 * key_dim + value_dim, size)
        self.in_proj = MergedColumnParallelLinear(
            shape.hidden_size,
            [key_dim, key_dim, value_dim, value_dim, shape.num_v_heads, shape.num_v_heads],
            bias=False,
            prefix=f"{prefix}.in_proj",
            tp_rank=rank,
            tp_size=size,
        )
        self.conv1d = ShortConvolution(self.in_proj.sections[:3], shape.conv_kernel_size)
        self.A_log = self._per_head_parameter(rank, size)
        self.dt_bias = self._per_head_parameter(rank, size)
        self.norm = RMSNormGated(shape.head_v_dim, shape.eps)
        self.out_proj = RowParallelLinear(
            value_dim,
            shape.hidden_size,
            bias=False,
            prefix=f"{prefix}.out_proj",
            tp_rank=rank,
            tp_size=size,
        )
        self.register(prefix)

    def _per_head_parameter(self, rank: int, size: int) -> nn.Parameter:
        # fp32 whatever the model: a decay near 1 does not survive bf16.
        param = empty_parameter(self.num_v_heads, dtype=torch.float32)
        section = Section(0, self.shape.num_v_heads, size, rank)
        set_weight_attrs(
            param, {"weight_loader": sections_loader((section,)), "dummy_range": (-3.0, -1.0)}
        )
        return param

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        projected, _ = self.in_proj(hidden_states)
        value_dim = self.num_v_heads * self.shape.head_v_dim
        qkv, z, b, a = projected.split(
            [self.conv_dim, value_dim, self.num_v_heads, self.num_v_heads], dim=-1
        )
        core = projected.new_empty(len(projected), self.num_v_heads, self.shape.head_v_dim)
        self.mix(qkv, a, b, core)
        gated = self.norm(core, z.unflatten(-1, (self.num_v_heads, self.shape.head_v_dim)))
        out: Tensor = self.out_proj(gated)[0]
        return out

    def mix(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Everything that depends on the batch's shape and touches state.

        `qkv [tokens, conv_dim]`, `a, b [tokens, value heads]`; fills `out [tokens, value heads,
        head_v_dim]`.
        """
        metadata = self.metadata()
        maybe_wait_for_layer_load(self.layer_name)
        if metadata.num_decodes:
            self._decode(qkv, a, b, metadata, out)
        if metadata.num_prefills:
            self._prefill(qkv, a, b, metadata, out)
        maybe_save_kv_layer(self.layer_name, self.kv_cache, metadata)

    def _decode(
        self, qkv: Tensor, a: Tensor, b: Tensor, metadata: GDNAttentionMetadata, out: Tensor
    ) -> None:
        rows = slice(0, metadata.num_decodes)
        conv_state, ssm_state = self.kv_cache
        current_platform.kernels.gdn_decode(
            qkv[rows],
            a[rows],
            b[rows],
            self.A_log,
            self.dt_bias,
            self.conv1d.weight,
            None,
            conv_state,
            ssm_state,
            metadata.state_indices[rows],
            out=out[rows],
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.shape.head_k_dim,
            head_v_dim=self.shape.head_v_dim,
        )

    def _prefill(
        self, qkv: Tensor, a: Tensor, b: Tensor, metadata: GDNAttentionMetadata, out: Tensor
    ) -> None:
        rows = slice(metadata.num_decodes, metadata.num_tokens)
        conv_state, ssm_state = self.kv_cache
        kernels = current_platform.kernels
        mixed = torch.empty_like(qkv[rows], memory_format=torch.contiguous_format)
        kernels.causal_conv1d(
            qkv[rows],
            self.conv1d.weight,
            None,
            conv_state,
            metadata.prefill_state_indices,
            metadata.has_initial_state,
            metadata.prefill_query_start_loc,
            out=mixed,
        )
        kernels.gdn_prefill(
            mixed,
            a[rows],
            b[rows],
            self.A_log,
            self.dt_bias,
            ssm_state,
            metadata.prefill_state_indices,
            metadata.has_initial_state,
            metadata.prefill_query_start_loc,
            metadata.chunk_indices,
            metadata.chunk_offsets,
            out=out[rows],
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.shape.head_k_dim,
            head_v_dim=self.shape.head_v_dim,
        )

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        return GDNAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        cache = vllm_config.cache_config
        model = vllm_config.model_config
        return MambaSpec(
            block_size=model.max_model_len,
            shapes=self.shape.state_shape(self.tp_size),
            dtypes=MambaStateDtypeCalculator.gated_delta_net_state_dtype(
                model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
            ),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        )
