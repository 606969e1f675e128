# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (arXiv 2412.06464) as in Qwen3.5: convolution, gated delta rule, gated norm."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import check_shared_evenly, copied_parts, per_rank
from vllm.forward_context import get_forward_context
from vllm.kernels.journal import GatedNorm, JournalStack
from vllm.kernels.residual_stream import ResidualStream
from vllm.kernels.tuning.shapes import DeltaRuleShape, KernelShapes, ReadsTiles
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill
from vllm.model_executor.layers.layernorm import RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    SharingColumnParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_utils import KEY_HEADS, MambaStateShapeCalculator
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.recurrent_mixer import RecurrentMixer, decay_parameter
from vllm.model_executor.layers.short_convolution import ShortConvolution
from vllm.model_executor.parameter import local_size
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import PrefillBatch
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum


@dataclass(frozen=True)
class GatedDeltaNetShape:
    """Sizes of the whole layer, before sharding. `beta_scale`: see `GdnPrefill`."""

    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int
    eps: float
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        check_shared_evenly(self.num_v_heads, "value heads", self.num_k_heads, "key heads")

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


def _gates_apart(quant_config: QuantizationConfig | None, prefix: str, num_v_heads: int) -> bool:
    """Whether q, k, v, z are quantised and the gates b, a are not."""
    if quant_config is None or quant_config.is_excluded(f"{prefix}.in_proj_qkvz"):
        return False
    gates_kept = quant_config.is_excluded(f"{prefix}.in_proj_ba")
    return gates_kept or quant_config.leaves_small(num_v_heads)


class GatedDeltaNet(RecurrentMixer, KeepsJournal, ReadsTiles):
    """Recurrent token mixer; keeps the convolution's last inputs and a matrix per head.

    `in_proj` fuses q, k, v, z, b, a (shard ids 0 to 5): `CHECKPOINT_NAMES` maps the tensors of a
    Qwen3.5 checkpoint onto it. Where q, k, v, z are quantised and b, a are not, these are a layer
    of their own, `in_proj_ba`. Decode rows (first in the batch) take the fused recurrent step,
    prefill rows the chunked form.
    """

    mamba_type = MambaAttentionBackendEnum.GDN_ATTN

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
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.tp_size = size = get_tp_group().world_size
        key_parts = copied_parts(KEY_HEADS, shape.num_k_heads, size)
        self.journal_key_heads = shape.num_k_heads // key_parts
        self.num_v_heads = per_rank("recurrent value heads", shape.num_v_heads, size)
        gates = [shape.num_v_heads, shape.num_v_heads]
        apart = _gates_apart(quant_config, prefix, shape.num_v_heads)
        key_dim, value_dim = shape.key_dim, shape.value_dim
        self.in_proj = SharingColumnParallelLinear(
            shape.hidden_size,
            [key_dim, key_dim, value_dim, value_dim, *([] if apart else gates)],
            shared=(0, 1),
            shared_parts=key_parts,
            quant_config=quant_config,
            bias=False,
            prefix=f"{prefix}.in_proj_qkvz" if apart else f"{prefix}.in_proj",
        )
        self.in_proj_ba: MergedColumnParallelLinear | None = None
        if apart:
            self.in_proj_ba = MergedColumnParallelLinear(
                shape.hidden_size, gates, bias=False, prefix=f"{prefix}.in_proj_ba"
            )
        self.conv1d = ShortConvolution(self.in_proj.sections[:3], shape.conv_kernel_size)
        self.conv_dim = local_size(self.conv1d.sections)
        self.A_log = decay_parameter(shape.num_v_heads)
        self.dt_bias = decay_parameter(shape.num_v_heads)
        self.norm = RMSNormGated(shape.head_v_dim, shape.eps)
        self.out_proj = RowParallelLinear(
            value_dim,
            shape.hidden_size,
            quant_config=quant_config,
            bias=False,
            prefix=f"{prefix}.out_proj",
        )
        self.layer_name = prefix

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        return self.out_proj(self.mixed(*self.project(hidden_states)))[0]

    def after_norm(
        self, norm: RMSNorm, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        if self.in_proj_ba is None:
            parts, total = self.in_proj.after_norm(norm, stream)
            projections = self._split(parts)
        else:
            normed, total = norm.enter(stream)
            projections = self.project(normed)
        return self.out_proj.add_to(total, self.mixed(*projections)), total

    def mixed(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """`[tokens, value dim]` of what `project` gives: all that touches state, gated and
        normed."""
        heads = (self.num_v_heads, self.shape.head_v_dim)
        gated, z = qkv.new_empty(len(qkv), *heads), z.unflatten(-1, heads)
        self.mix(gated, qkv, a, b, z)
        self._norm_prefills(z, gated)
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

    def decode(self, blocks: Tensor, out: Tensor, *tokens: Tensor) -> None:
        """`tokens`: qkv `[tokens, conv_dim]`, a and b `[tokens, value heads]`, z like `out
        [tokens, value heads, head_v_dim]`, which gets the gated norm as well."""
        qkv, a, b, z = tokens
        conv_state, ssm_state = self.kv_cache
        problem = GdnDecode(
            qkv,
            a,
            b,
            self.A_log,
            self.dt_bias,
            ssm_state,
            blocks,
            self.conv1d.weight,
            None,
            conv_state,
            out,
            self.journal,
            GatedNorm(z, self.norm.weight, self.norm.eps),
            beta_scale=self.shape.beta_scale,
        )
        current_platform.kernels.gdn_decode(problem)

    def _norm_prefills(self, z: Tensor, out: Tensor) -> None:
        """The gated norm of what is no decode; padding's is never read."""
        context = get_forward_context()
        if not context.only_decodes:
            done = context.decode_blocks[self.layer_name]
            if context.decode_width > 1:
                done = done.repeat_interleave(context.decode_width)
            norm = self.norm
            current_platform.kernels.gated_rms_norm(out, z, norm.weight, norm.eps, out, done)

    def prefill(self, batch: PrefillBatch, out: Tensor, *tokens: Tensor) -> None:
        """See `decode`; the norm is left to `_norm_prefills`."""
        qkv, a, b, _ = tokens
        conv_state, ssm_state = self.kv_cache
        problem = GdnPrefill(
            self.conv1d(qkv, conv_state, batch),
            a,
            b,
            self.A_log,
            self.dt_bias,
            ssm_state,
            batch.state_indices,
            batch.has_initial_state,
            batch.query_start_loc,
            batch.chunk_indices,
            batch.chunk_offsets,
            out,
            batch.segments,
            beta_scale=self.shape.beta_scale,
        )
        current_platform.kernels.gdn_prefill(problem)

    def kernel_shapes(self) -> KernelShapes:
        shape = self.shape
        heads = (self.journal_key_heads, self.num_v_heads, shape.head_k_dim, shape.head_v_dim)
        return KernelShapes(delta_rules=(DeltaRuleShape(*heads, shape.beta_scale),))

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.gdn_commit(stack, entries)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shape.state_shape(self.tp_size)
