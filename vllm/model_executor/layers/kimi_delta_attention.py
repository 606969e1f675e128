# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: convolutions, a delta rule with a decay per key channel, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.layer_hooks import (
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
)
from vllm.distributed.utils import per_rank
from vllm.forward_context import get_forward_context
from vllm.kernels.journal import JournalShape, JournalStack
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaGates, KdaPrefill
from vllm.model_executor.layers.gated_delta_net import ShortConvolution
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    resolve_tp,
)
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.parameter import Section, empty_parameter, sections_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.kv_cache_interface import MambaAttentionBackendEnum, MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class KimiDeltaAttentionShape:
    """Sizes of the whole layer, before sharding."""

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_kernel_size: int
    eps: float

    @property
    def width(self) -> int:
        """Of all heads' queries, and as much of keys and values."""
        return self.num_heads * self.head_dim


class KimiDeltaAttention(nn.Module, KeepsJournal):
    """Recurrent token mixer; keeps the convolutions' last inputs and a matrix per head.

    `in_proj` fuses q, k, v and beta, `conv1d` the convolutions of q, k and v (`CHECKPOINT_NAMES`
    maps a checkpoint's tensors onto them). Decays come from `f_b_proj(f_a_proj(x))`, the output's
    gates from `g_b_proj(g_a_proj(x))`.
    """

    reads_fixed_addresses = True

    CHECKPOINT_NAMES: ClassVar[tuple[tuple[str, str, int], ...]] = (
        ("in_proj", "q_proj", 0),
        ("in_proj", "k_proj", 1),
        ("in_proj", "v_proj", 2),
        ("in_proj", "b_proj", 3),
        ("conv1d", "q_conv1d", 0),
        ("conv1d", "k_conv1d", 1),
        ("conv1d", "v_conv1d", 2),
    )

    def __init__(
        self,
        shape: KimiDeltaAttentionShape,
        prefix: str = "",
        *,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        rank, size = resolve_tp(tp_rank, tp_size, disable_tp=False)
        self.shape, self.tp_size, self.layer_name = shape, size, prefix
        self.num_heads = per_rank("recurrent heads", shape.num_heads, size)
        hidden, width, low = shape.hidden_size, shape.width, shape.head_dim

        def options(name: str) -> dict[str, Any]:
            return {"bias": False, "prefix": f"{prefix}.{name}", "quant_config": quant_config}

        shard: dict[str, Any] = {"tp_rank": rank, "tp_size": size}
        sizes = [width, width, width, shape.num_heads]
        self.in_proj = MergedColumnParallelLinear(hidden, sizes, **options("in_proj"), **shard)
        self.f_a_proj = ReplicatedLinear(hidden, low, **options("f_a_proj"))
        self.f_b_proj = ColumnParallelLinear(low, width, **options("f_b_proj"), **shard)
        self.g_a_proj = ReplicatedLinear(hidden, low, **options("g_a_proj"))
        self.g_b_proj = ColumnParallelLinear(low, width, **options("g_b_proj"), **shard)
        self.conv1d = ShortConvolution(self.in_proj.sections[:3], shape.conv_kernel_size)
        self.A_log = _fp32_parameter(shape.num_heads, rank, size)
        self.dt_bias = _fp32_parameter(width, rank, size)
        self.o_norm = RMSNorm(shape.head_dim, shape.eps)
        self.o_proj = RowParallelLinear(width, hidden, **options("o_proj"), **shard)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        heads = (self.num_heads, self.shape.head_dim)
        width = self.num_heads * self.shape.head_dim
        qkv, b = self.in_proj(hidden_states)[0].split([3 * width, self.num_heads], dim=-1)
        a = self.f_b_proj(self.f_a_proj(hidden_states)[0])[0].unflatten(-1, heads)
        gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0].unflatten(-1, heads)
        mixed = qkv.new_empty(len(qkv), *heads)
        self.mix(qkv, a, b, mixed)
        out = current_platform.kernels.mul_sigmoid(self.o_norm.normalise(mixed), gate)
        projected: Tensor = self.o_proj(out)[0]
        return projected

    def mix(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Everything that touches state: `qkv [tokens, channels]`, `a [tokens, heads, head_dim]`
        and `b [tokens, heads]` fill `out [tokens, heads, head_dim]`."""
        if has_kv_transfer_group():
            # What a connector loads comes before what the step computes from it.
            self._load_and_mix(qkv, a, b, out)
        else:
            self._decode(qkv, a, b, out)
            self._prefill(qkv, a, b, out)

    @graph_break
    def _load_and_mix(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        metadata = self.metadata()
        maybe_wait_for_layer_load(self.layer_name)
        self._decode(qkv, a, b, out)
        self._prefill(qkv, a, b, out)
        maybe_save_kv_layer(self.layer_name, self.kv_cache, metadata)

    def _gates(self, a: Tensor, b: Tensor) -> KdaGates:
        return KdaGates(a, b, self.A_log, self.dt_bias.view(self.num_heads, -1))

    def _decode(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """The first tokens, as far as they are decodes."""
        context = get_forward_context()
        blocks = context.decode_blocks[self.layer_name]
        rows = blocks.shape[0] * context.decode_width
        if rows == 0:
            return
        conv_state, state = self.kv_cache
        problem = KdaDecode(
            qkv[:rows],
            self._gates(a[:rows], b[:rows]),
            self.conv1d.weight,
            conv_state,
            state,
            blocks,
            out[:rows],
            self.journal,
        )
        current_platform.kernels.kda_decode(problem)

    def _prefill(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """All that are no decodes; absent sequences of a padded step are skipped."""
        if get_forward_context().only_decodes:
            return
        batch = self.metadata().batch
        if batch.is_empty:
            return
        conv_state, state = self.kv_cache
        sequences = (batch.state_indices, batch.has_initial_state, batch.query_start_loc)
        qkv = qkv[batch.rows]
        mixed = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        current_platform.kernels.causal_conv1d(
            qkv, self.conv1d.weight, None, conv_state, *sequences, out=mixed
        )
        gates = self._gates(a[batch.rows], b[batch.rows])
        problem = KdaPrefill(mixed, gates, state, *sequences, out[batch.rows])
        current_platform.kernels.kda_prefill(problem)

    def journal_shape(self, spec: MambaSpec) -> JournalShape:
        sizes = (self.num_heads, self.num_heads, self.shape.head_dim, self.shape.head_dim)
        conv_dtype, state_dtype = spec.dtypes
        return JournalShape(
            *sizes,
            state_dtype=state_dtype,
            channels=3 * self.num_heads * self.shape.head_dim,
            input_dtype=conv_dtype,
            channel_decay=True,
        )

    @staticmethod
    def commit(stack: JournalStack, entries: Tensor) -> None:
        current_platform.kernels.kda_commit(stack, entries)

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        return GDNAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        cache, model, shape = vllm_config.cache_config, vllm_config.model_config, self.shape
        heads, dim = shape.num_heads, shape.head_dim
        return MambaSpec(
            block_size=model.max_model_len,
            shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(
                self.tp_size, heads, heads, dim, dim, shape.conv_kernel_size
            ),
            dtypes=MambaStateDtypeCalculator.gated_delta_net_state_dtype(
                model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
            ),
            mamba_type=MambaAttentionBackendEnum.KDA_ATTN,
        )


def _fp32_parameter(entries: int, rank: int, size: int) -> nn.Parameter:
    """One of the decay's, sharded; fp32 whatever the model: a decay near 1 does not survive bf16.
    It is loaded from a tensor of any shape with as many entries."""
    param = empty_parameter(entries // size, dtype=torch.float32)
    load = sections_loader((Section(0, entries, size, rank),))

    def load_flat(param: Tensor, loaded: Tensor) -> None:
        load(param, loaded.flatten())

    set_weight_attrs(param, {"weight_loader": load_flat, "dummy_range": (-3.0, -1.0)})
    return param
