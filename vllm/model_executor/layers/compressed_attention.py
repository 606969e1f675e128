# SPDX-License-Identifier: Apache-2.0
"""Attention over a window and compressed entries (DeepSeek-V4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.utils import per_rank
from vllm.exceptions import VLLMValidationError
from vllm.kernels.compressed_attention import ChooseProblem, CompressedAttentionProblem
from vllm.kernels.compressed_attention.rotation import rotate_pairs
from vllm.model_executor.layers.attention import kv_cache_torch_dtype
from vllm.model_executor.layers.compressor import Compressor, RowCache
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    linear,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.self_attention import attention_sinks
from vllm.platforms import current_platform

#: tokens per entry of which only the best are attended to; their windows overlap
SPARSE_RATIO = 4
#: tokens per entry of which all are attended to
DENSE_RATIO = 128


@dataclass(frozen=True)
class CompressedAttentionShape:
    """Sizes of the whole layer before sharding.

    The last `rotary_dim` of a head's `head_dim` dimensions rotate. `query_low_rank`: of what
    queries are made from. The output is projected in `output_groups` of neighbouring heads to
    `output_low_rank` each, and together to the hidden size. `window`: tokens seen as they are, the
    own one included; `ratio`: tokens per entry, 0 for no entries. `index_heads`, `index_dim`,
    `index_topk`: of what chooses entries, with ratio 4 only. `eps`: of all norms.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    query_low_rank: int
    output_groups: int
    output_low_rank: int
    window: int
    ratio: int
    index_heads: int
    index_dim: int
    index_topk: int
    eps: float

    def __post_init__(self) -> None:
        if self.ratio not in (0, SPARSE_RATIO, DENSE_RATIO):
            raise VLLMValidationError(
                f"compress ratio {self.ratio} is not supported; supported: 0 (a window only), "
                f"{SPARSE_RATIO} and {DENSE_RATIO}"
            )


@dataclass(frozen=True)
class IndexQuery:
    """How a step's tokens choose entries: see `ChooseProblem`."""

    query: Tensor
    head_weights: Tensor
    chosen: Tensor


class Indexer(nn.Module):
    """Chooses the entries that a token attends to, by keys of its own; whole on every rank."""

    def __init__(
        self,
        shape: CompressedAttentionShape,
        rope: RotaryEmbedding,
        dtype: torch.dtype,
        prefix: str,
        quant_config: QuantizationConfig | None,
    ) -> None:
        super().__init__()
        self.heads, self.topk = shape.index_heads, shape.index_topk
        self.scale = (shape.index_heads * shape.index_dim) ** -0.5
        self.wq_b = ReplicatedLinear(
            shape.query_low_rank,
            shape.index_heads * shape.index_dim,
            bias=False,
            prefix=f"{prefix}.wq_b",
            quant_config=quant_config,
        )
        self.weights_proj = ReplicatedLinear(
            shape.hidden_size, shape.index_heads, bias=False, prefix=f"{prefix}.weights_proj"
        )
        prefix = f"{prefix}.compressor"
        keys = RowCache(
            f"{prefix}.entries",
            shape.index_dim,
            dtype,
            ratio=shape.ratio,
            products=shape.index_heads,
        )
        self.compressor = Compressor(
            shape.hidden_size, keys, rope, prefix, overlap=True, eps=shape.eps
        )

    def forward(self, hidden_states: Tensor, latent: Tensor, angles: Tensor) -> IndexQuery:
        """Of `hidden_states [tokens, hidden]` and `latent [tokens, query_low_rank]`."""
        query = self.wq_b(latent)[0].unflatten(-1, (self.heads, -1))
        weights = self.weights_proj(hidden_states)[0].float() * self.scale
        chosen = torch.empty(len(query), self.topk, dtype=torch.int32, device=query.device)
        return IndexQuery(rotate_pairs(query, angles), weights, chosen)

    def choose(self, run: int, tokens: slice, positions: Tensor, index: IndexQuery) -> Tensor:
        """The entries of a run's `tokens`, in their part of `index.chosen`."""
        chosen = index.chosen[tokens]
        problem = ChooseProblem(
            index.query[tokens],
            index.head_weights[tokens],
            self.compressor.entries.of_run(run),
            positions[tokens],
            self.compressor.ratio,
            chosen,
        )
        current_platform.kernels.choose_entries(problem)
        return chosen


class CompressedAttention(nn.Module):
    """Causal attention to the tokens of a window and to entries that stand for many tokens.

    Keys are values, and all heads share them. Heads and output groups are sharded; every rank
    computes and keeps all rows. Modules are named as in the release checkpoint. `wo_a` is
    multiplied group by group, so it is never quantised.
    """

    def __init__(
        self,
        shape: CompressedAttentionShape,
        rope: RotaryEmbedding,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.rope, self.prefix = shape, rope, prefix
        ranks = get_tp_group().world_size
        self.num_heads = per_rank("attention heads", shape.num_heads, ranks)
        self.num_groups = per_rank("groups of the output", shape.output_groups, ranks)
        dtype = kv_cache_torch_dtype(
            get_current_vllm_config(), never_fp8=f"{prefix}: compressed attention"
        )

        def replicated(inputs: int, outputs: int, name: str) -> ReplicatedLinear:
            where = f"{prefix}.{name}"
            return ReplicatedLinear(
                inputs, outputs, bias=False, prefix=where, quant_config=quant_config
            )

        self.wq_a = replicated(shape.hidden_size, shape.query_low_rank, "wq_a")
        self.q_norm = RMSNorm(shape.query_low_rank, shape.eps)
        self.wq_b = ColumnParallelLinear(
            shape.query_low_rank,
            shape.num_heads * shape.head_dim,
            bias=False,
            prefix=f"{prefix}.wq_b",
            quant_config=quant_config,
        )
        self.register_buffer("head_norm", torch.ones(shape.head_dim), persistent=False)
        self.wkv = replicated(shape.hidden_size, shape.head_dim, "wkv")
        self.kv_norm = RMSNorm(shape.head_dim, shape.eps)
        self.attn_sink = attention_sinks(shape.num_heads)
        self.wo_a = ColumnParallelLinear(
            shape.num_heads * shape.head_dim // shape.output_groups,
            shape.output_groups * shape.output_low_rank,
            bias=False,
            prefix=f"{prefix}.wo_a",
        )
        self.wo_b = RowParallelLinear(
            shape.output_groups * shape.output_low_rank,
            shape.hidden_size,
            bias=False,
            prefix=f"{prefix}.wo_b",
            quant_config=quant_config,
        )
        # Each row is multiplied twice, as key and as value.
        row_cache = partial(
            RowCache, width=shape.head_dim, dtype=dtype, products=2 * self.num_heads
        )
        self.tokens = row_cache(f"{prefix}.tokens", window=shape.window)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        is_sparse = shape.ratio == SPARSE_RATIO
        if shape.ratio:
            where = f"{prefix}.compressor"
            entries = row_cache(
                f"{where}.entries",
                ratio=shape.ratio,
                decode_tokens=shape.index_topk * shape.ratio if is_sparse else None,
            )
            self.compressor = Compressor(
                shape.hidden_size, entries, rope, where, overlap=is_sparse, eps=shape.eps
            )
        if is_sparse:
            self.indexer = Indexer(shape, rope, dtype, f"{prefix}.indexer", quant_config)

    head_norm: Tensor

    @property
    def compressors(self) -> list[Compressor]:
        indexing = None if self.indexer is None else self.indexer.compressor
        return [one for one in (self.compressor, indexing) if one is not None]

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """`positions [tokens]` int64, `hidden_states [tokens, hidden] -> [tokens, hidden]`."""
        angles = self.rope.cos_sin_cache[positions]
        latent = self.q_norm.normalise(self.wq_a(hidden_states)[0])
        query = self.wq_b(latent)[0].unflatten(-1, (self.num_heads, -1))
        query = current_platform.kernels.rms_norm(query, self.head_norm, self.shape.eps)
        query = rotate_pairs(query, angles)
        row = rotate_pairs(self.kv_norm.normalise(self.wkv(hidden_states)[0]), angles)
        caches, rows = [self.tokens], [row]
        for compressor in self.compressors:
            caches += compressor.caches
            rows.append(compressor.token_rows(positions, hidden_states))
        index = None if self.indexer is None else self.indexer(hidden_states, latent, angles)
        out = torch.empty_like(query)
        self._with_connector(caches, self._cache_and_attend, positions, query, rows, index, out)
        return self._project(rotate_pairs(out, angles, inverse=True))

    def _with_connector(
        self, caches: Sequence[RowCache], run: Callable[..., None], *args: object
    ) -> None:
        """`run(*args)` after a connector has loaded all `caches` and before it saves them."""
        if not caches:
            run(*args)
        else:
            caches[0].with_connector(self._with_connector, caches[1:], run, *args)

    def _cache_and_attend(
        self,
        positions: Tensor,
        query: Tensor,
        rows: list[Tensor],
        index: IndexQuery | None,
        out: Tensor,
    ) -> None:
        """Slots lie at a fixed address, so a graph may hold the writes."""
        caches = [self.tokens, *(one.tokens for one in self.compressors)]
        for cache, written in zip(caches, rows, strict=True):
            cache.write(written)
        self._attend(positions, query, index, out)

    @graph_break
    def _attend(
        self, positions: Tensor, query: Tensor, index: IndexQuery | None, out: Tensor
    ) -> None:
        for number, run in enumerate(self.tokens.metadata().runs):
            for compressor in self.compressors:
                compressor.compress(number, positions)
            chosen = None
            if self.indexer is not None and index is not None:
                chosen = self.indexer.choose(number, run.tokens, positions, index)
            entries = None if self.compressor is None else self.compressor.entries.of_run(number)
            problem = CompressedAttentionProblem(
                query[run.tokens],
                self.tokens.of_run(number),
                self.shape.window,
                self.attn_sink,
                self.shape.head_dim**-0.5,
                positions[run.tokens],
                out[run.tokens],
                entries,
                max(self.shape.ratio, 1),
                chosen,
            )
            current_platform.kernels.compressed_attention(problem)

    def _project(self, out: Tensor) -> Tensor:
        """`out [tokens, heads, head_dim] -> [tokens, hidden]`."""
        grouped = out.view(len(out), self.num_groups, -1)
        weights = self.wo_a.weight.unflatten(0, (self.num_groups, -1))
        low = [linear(grouped[:, group], weights[group]) for group in range(self.num_groups)]
        return self.wo_b(torch.cat(low, dim=-1))[0]

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, window={self.shape.window}, ratio={self.shape.ratio}"
