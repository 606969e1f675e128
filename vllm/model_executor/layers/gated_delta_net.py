# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (arXiv 2412.06464) as in Qwen3.5: convolution, gated delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.layer_hooks import (
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.distributed.utils import divide, per_rank
from vllm.forward_context import get_forward_context
from vllm.kernels.journal import GatedNorm, JournalShape, JournalStack
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.layernorm import RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    resolve_tp,
)
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.parameter import (
    Section,
    ShardId,
    empty_parameter,
    load_sections,
    local_size,
    sections_loader,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
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

    def weight_loader(self, param: Tensor, loaded: Tensor, shard_id: ShardId | None = None) -> None:
        """`loaded [channels, 1, width]` as torch's Conv1d stores it, of all sections or of one."""
        flat = loaded.squeeze(1) if loaded.dim() == 3 else loaded
        load_sections(param, flat, shard_id, sections=self.sections)


def _gates_apart(quant_config: QuantizationConfig | None, prefix: str, num_v_heads: int) -> bool:
    """Whether q, k, v, z are quantised and the gates b, a are not."""
    if quant_config is None or quant_config.is_excluded(f"{prefix}.in_proj_qkvz"):
        return False
    gates_kept = quant_config.is_excluded(f"{prefix}.in_proj_ba")
    return gates_kept or quant_config.leaves_small(num_v_heads)


class GatedDeltaNet(nn.Module, KeepsJournal):
    """Recurrent token mixer; keeps the convolution's last inputs and a matrix per head.

    `in_proj` fuses q, k, v, z, b, a (shard ids 0 to 5): `CHECKPOINT_NAMES` maps the tensors of a
    Qwen3.5 checkpoint onto it. Where q, k, v, z are quantised and b, a are not, these are a layer
    of their own, `in_proj_ba`. Decode rows (first in the batch) take the fused recurrent step,
    prefill rows the chunked form.
    """

    reads_fixed_addresses = True

    CHECKPOINT_NAMES: ClassVar[tuple[tuple[str, str, int | tuple[int, ...]], ...]] = (
        ("in_proj_ba", "in_proj_b", 0),
        ("in_proj_ba", "in_proj_a", 1),
        ("in_proj_qkvz", "in_proj_qkv", (0, 1, 2)),
        ("in_proj_qkvz", "in_proj_z", 3),
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
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        rank, size = resolve_tp(tp_rank, tp_size, disable_tp=False)
        self.shape = shape
        self.tp_size = size
        self.num_k_heads = per_rank("recurrent key heads", shape.num_k_heads, size)
        self.num_v_heads = per_rank("recurrent value heads", shape.num_v_heads, size)
        key_dim, value_dim = shape.key_dim, shape.value_dim
        self.conv_dim = divide(2 * key_dim + value_dim, size)
        gates = [shape.num_v_heads, shape.num_v_heads]
        apart = _gates_apart(quant_config, prefix, shape.num_v_heads)
        self.in_proj = MergedColumnParallelLinear(
            shape.hidden_size,
            [key_dim, key_dim, value_dim, value_dim, *([] if apart else gates)],
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj_qkvz" if apart else f"{prefix}.in_proj",
            tp_rank=rank,
            tp_size=size,
        )
        self.in_proj_ba: MergedColumnParallelLinear | None = None
        if apart:
            self.in_proj_ba = MergedColumnParallelLinear(
                shape.hidden_size,
                gates,
                bias=False,
                prefix=f"{prefix}.in_proj_ba",
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
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            tp_rank=rank,
            tp_size=size,
        )
        self.layer_name = prefix

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
        out: Tensor = self.out_proj(self._mixed(*self.project(hidden_states)))[0]
        return out

    def after_norm(self, norm: RMSNorm, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        """The stream, added up, with this layer of its norm as a branch; and its sum."""
        if self.in_proj_ba is None:
            parts, total = self.in_proj.after_norm(norm, stream)
            projections = self._split(parts)
        else:
            normed, total = norm.enter(stream)
            projections = self.project(normed)
        return self.out_proj.add_to(total, self._mixed(*projections)), total

    def _mixed(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        heads = (self.num_v_heads, self.shape.head_v_dim)
        gated = qkv.new_empty(len(qkv), *heads)
        self.mix(qkv, a, b, z.unflatten(-1, heads), gated)
        return gated.flatten(1)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv `[tokens, conv_dim]`, z `[tokens, value dim]`, b and a `[tokens, value heads]`."""
        parts, _ = self.in_proj(hidden_states)
        if self.in_proj_ba is None:
            return self._split(parts)
        qkv, z = parts.split([self.conv_dim, self.num_v_heads * self.shape.head_v_dim], dim=-1)
        b, a = self.in_proj_ba(hidden_states)[0].split(self.num_v_heads, dim=-1)
        return qkv, z, b, a

    def _split(self, parts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads = self.num_v_heads
        sizes = [self.conv_dim, heads * self.shape.head_v_dim, heads, heads]
        qkv, z, b, a = parts.split(sizes, dim=-1)
        return qkv, z, b, a

    def mix(self, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> None:
        """Everything that touches state, and the gated norm.

        `qkv [tokens, conv_dim]`, `a, b [tokens, value heads]`; fills `out [tokens, value heads,
        head_v_dim]`, gated by `z` of that shape.
        """
        if has_kv_transfer_group():
            # What a connector loads comes before what the step computes from it.
            self._load_and_mix(qkv, a, b, z, out)
        else:
            self._decode(qkv, a, b, z, out)
            self._prefill(qkv, a, b, out)
        self._norm_prefills(z, out)

    @graph_break
    def _load_and_mix(self, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> None:
        metadata = self.metadata()
        maybe_wait_for_layer_load(self.layer_name)
        self._decode(qkv, a, b, z, out)
        self._prefill(qkv, a, b, out)
        maybe_save_kv_layer(self.layer_name, self.kv_cache, metadata)

    def _decode(self, qkv: Tensor, a: Tensor, b: Tensor, z: Tensor, out: Tensor) -> None:
        """The first tokens, as far as they are decodes. Their blocks lie at a fixed address and
        their number follows from the step's padded size, so a graph may hold this."""
        context = get_forward_context()
        blocks = context.decode_blocks[self.layer_name]
        rows = blocks.shape[0] * context.decode_width
        if rows == 0:
            return
        conv_state, ssm_state = self.kv_cache
        current_platform.kernels.gdn_decode(
            qkv[:rows],
            a[:rows],
            b[:rows],
            self.A_log,
            self.dt_bias,
            self.conv1d.weight,
            None,
            conv_state,
            ssm_state,
            blocks,
            out=out[:rows],
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.shape.head_k_dim,
            head_v_dim=self.shape.head_v_dim,
            journal=self.journal,
            norm=GatedNorm(z[:rows], self.norm.weight, self.norm.eps),
        )

    def _norm_prefills(self, z: Tensor, out: Tensor) -> None:
        """The gated norm of what is no decode; padding's is never read."""
        context = get_forward_context()
        if not context.only_decodes:
            done = context.decode_blocks[self.layer_name]
            if context.decode_width > 1:
                done = done.repeat_interleave(context.decode_width)
            norm = self.norm
            current_platform.kernels.gated_rms_norm(out, z, norm.weight, norm.eps, out, done)

    def _prefill(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """All that are no decodes. In a padded step what says which is of fixed size, and empty
        sequences are skipped, so a graph may hold this too."""
        if get_forward_context().only_decodes:
            return
        batch = self.metadata().batch
        if batch.is_empty:
            return
        qkv, out = qkv[batch.rows], out[batch.rows]
        conv_state, ssm_state = self.kv_cache
        kernels = current_platform.kernels
        mixed = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        kernels.causal_conv1d(
            qkv,
            self.conv1d.weight,
            None,
            conv_state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            out=mixed,
        )
        kernels.gdn_prefill(
            mixed,
            a[batch.rows],
            b[batch.rows],
            self.A_log,
            self.dt_bias,
            ssm_state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            batch.chunk_indices,
            batch.chunk_offsets,
            out=out,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.shape.head_k_dim,
            head_v_dim=self.shape.head_v_dim,
            segments=batch.segments,
        )

    def journal_shape(self, spec: MambaSpec) -> JournalShape:
        shape = self.shape
        heads = (self.num_k_heads, self.num_v_heads)
        return JournalShape(
            *heads,
            shape.head_k_dim,
            shape.head_v_dim,
            state_dtype=spec.dtypes[1],
            channels=self.conv_dim,
            input_dtype=spec.dtypes[0],
        )

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.gdn_commit(stack, entries)

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
