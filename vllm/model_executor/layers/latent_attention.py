# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import per_rank
from vllm.forward_context import get_forward_context
from vllm.kernels.tuning.shapes import AttentionShape, KernelShapes, ReadsTiles
from vllm.model_executor.layers.attention import kv_cache_torch_dtype
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.selector import get_latent_attn_backend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

#: of the norms of latents, whatever the model's other norms have
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentAttentionShape:
    """Sizes of the whole layer before sharding.

    A head's query and key have `nope_dim` dimensions of their own and `shared_dim` whose key all
    heads share (which rotate, if any do), its value `value_dim`. `latent_dim`: of what keys and
    values are made from; `query_latent_dim`: of what queries are made from, None: the hidden state.
    `bias`: of the projections to latents and of the output.
    """

    hidden_size: int
    num_heads: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    latent_dim: int
    query_latent_dim: int | None = None
    bias: bool = False

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.shared_dim

    @property
    def row(self) -> int:
        """Elements kept per token."""
        return self.latent_dim + self.shared_dim


class MultiHeadLatentAttention(nn.Module, AttentionLayerBase, ReadsTiles):
    """Causal attention that keeps one row per token: the latent, normalised, and the shared key.

    Heads are sharded; every rank computes and keeps all of the row. Modules are named as in
    DeepSeek's checkpoints. `kv_b_proj` is multiplied head by head, so it is never quantised.
    Without `rotary_emb` nothing rotates; with `interleaved` dimensions 2 i and 2 i + 1 are a pair.
    """

    decode_launches = 6

    def __init__(
        self,
        shape: LatentAttentionShape,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
        rotary_emb: RotaryEmbedding | None = None,
        *,
        interleaved: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.layer_name = shape, prefix
        self.rotary_emb, self.interleaved = rotary_emb, interleaved
        heads = shape.num_heads
        self.num_heads = per_rank("attention heads", heads, get_tp_group().world_size)

        def options(name: str, bias: bool = False) -> dict[str, Any]:
            return {"bias": bias, "prefix": f"{prefix}.{name}", "quant_config": quant_config}

        def of_heads(inputs: int, name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(inputs, heads * shape.query_dim, **options(name))

        if shape.query_latent_dim is None:
            self.q_proj = of_heads(shape.hidden_size, "q_proj")
        else:
            low = shape.query_latent_dim
            self.q_a_proj = ReplicatedLinear(
                shape.hidden_size, low, **options("q_a_proj", shape.bias)
            )
            self.q_a_layernorm = RMSNorm(low, LATENT_EPS)
            self.q_b_proj = of_heads(low, "q_b_proj")
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            shape.hidden_size, shape.row, **options("kv_a_proj_with_mqa", shape.bias)
        )
        self.kv_a_layernorm = RMSNorm(shape.latent_dim, LATENT_EPS)
        self.kv_b_proj = ColumnParallelLinear(
            shape.latent_dim,
            heads * (shape.nope_dim + shape.value_dim),
            bias=False,
            prefix=f"{prefix}.kv_b_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * shape.value_dim, shape.hidden_size, **options("o_proj", shape.bias)
        )
        self._choose_backend(shape.query_dim**-0.5 if scale is None else scale)

    @property
    def decode_flops_per_element(self) -> float:
        """Each head's products with the row, and with the latent in it."""
        return 2.0 * self.num_heads * (1 + self.shape.latent_dim / self.shape.row)

    def _choose_backend(self, scale: float) -> None:
        config = get_current_vllm_config()
        self.kv_cache_dtype = kv_cache_torch_dtype(
            config, never_fp8=f"{self.layer_name}: latent attention"
        )
        self.attn_backend = get_latent_attn_backend()
        most_tokens = config.scheduler_config.max_num_batched_tokens
        self.impl = self.attn_backend.get_impl_cls()(scale, room=most_tokens * self.num_heads)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """`positions [tokens]` int64, `hidden_states [tokens, hidden] -> [tokens, hidden]`."""
        shape = self.shape
        query = self._query(hidden_states).unflatten(-1, (self.num_heads, shape.query_dim))
        latent, shared = self.kv_a_proj_with_mqa(hidden_states)[0].split(
            [shape.latent_dim, shape.shared_dim], dim=-1
        )
        if self.rotary_emb is not None:
            own, turning = query.split([shape.nope_dim, shape.shared_dim], dim=-1)
            if self.interleaved:
                turning, shared = _in_halves(turning), _in_halves(shared)
            turned, shared = self.rotary_emb(positions, turning, shared)
            query = torch.cat([own, turned], dim=-1)
        rows = torch.cat([self.kv_a_layernorm.normalise(latent), shared], dim=-1)
        out = query.new_empty(len(query), self.num_heads, shape.value_dim)
        self.with_connector(self._cache_and_attend, query, rows, out)
        return self.o_proj(out.flatten(1))[0]

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.shape.query_latent_dim is None:
            return self.q_proj(hidden_states)[0]
        latent = self.q_a_layernorm.normalise(self.q_a_proj(hidden_states)[0])
        query = self.q_b_proj(latent)[0]
        return query

    def _cache_and_attend(self, query: Tensor, rows: Tensor, out: Tensor) -> None:
        """Slots lie at a fixed address, so a graph may hold the write."""
        slots = get_forward_context().slot_mapping[self.layer_name]
        current_platform.kernels.write_rows(rows[:, None], self.kv_cache.unsqueeze(2), slots)
        self._attend(query, out)

    @graph_break
    def _attend(self, query: Tensor, out: Tensor) -> None:
        kv_b = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        self.impl.forward(query, kv_b, self.kv_cache, self.metadata(), out)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.shape.row,
            dtype=self.kv_cache_dtype,
        )

    def kernel_shapes(self) -> KernelShapes:
        """Of long prompts, whose heads are sequences (`kernels/latent_attention/expanded.py`)."""
        shape = self.shape
        if shape.value_dim > shape.query_dim:
            return KernelShapes()
        apart = AttentionShape(1, 1, shape.query_dim, heads_apart=self.num_heads)
        return KernelShapes(attention=(apart,))

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, row={self.shape.row}"


def _in_halves(x: Tensor) -> Tensor:
    """The first of each pair of neighbours, then the second: the order of queries and keys does not
    change their products, as long as it is the same."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
