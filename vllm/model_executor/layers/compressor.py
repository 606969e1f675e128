# SPDX-License-Identifier: Apache-2.0
"""Paged caches of a layer that has several, and compressors, which make entries of tokens."""

from math import lcm

import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.kernels.compressed_attention import CompressProblem, PagedRows
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.parameter import default_weight_loader, empty_parameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.compressed import CompressedAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec


class RowCache(nn.Module, AttentionLayerBase):
    """Rows of `width` elements, one per `ratio` tokens; with a `window` those of so many tokens.

    `products`: of a decode with each element that it reads, which are of `decode_tokens` tokens.
    """

    kv_cache: Tensor

    def __init__(
        self,
        layer_name: str,
        width: int,
        dtype: torch.dtype,
        *,
        window: int | None = None,
        ratio: int = 1,
        decode_tokens: int | None = None,
        products: int = 1,
    ) -> None:
        super().__init__()
        self.layer_name, self.width, self.dtype = layer_name, width, dtype
        self.window, self.ratio = window, ratio
        self.decode_tokens, self.products = decode_tokens, products

    @property
    def decode_flops_per_element(self) -> float:
        return 2.0 * self.products

    def write(self, rows: Tensor) -> None:
        """Put the step's `rows [tokens, width]` into their slots, which lie at a fixed address."""
        slots = get_forward_context().slot_mapping[self.layer_name]
        current_platform.kernels.write_rows(rows[:, None], self.kv_cache.unsqueeze(2), slots)

    def of_run(self, run: int) -> PagedRows:
        """The rows of the sequences of one of the step's runs."""
        return PagedRows(self.kv_cache, self.metadata().runs[run].block_table)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CompressedAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        block_size = vllm_config.cache_config.block_size
        if self.window is not None:
            return SlidingWindowMLASpec(
                block_size=block_size,
                num_kv_heads=1,
                head_size=self.width,
                dtype=self.dtype,
                sliding_window=self.window,
            )
        return MLAAttentionSpec(
            block_size=lcm(block_size, self.ratio),
            num_kv_heads=1,
            head_size=self.width,
            dtype=self.dtype,
            compress_ratio=self.ratio,
        )

    def extra_repr(self) -> str:
        return f"width={self.width}, window={self.window}, ratio={self.ratio}"


class Compressor(nn.Module):
    """Makes the rows of `entries`; with `overlap` each of twice as many tokens as it stands for.

    Each token leaves a row of values and scores in fp32; `ape` is what a score has for its place in
    the window. Every rank computes and keeps all of it. The weights are small: never quantised.
    """

    def __init__(
        self,
        hidden_size: int,
        entries: RowCache,
        rope: RotaryEmbedding,
        prefix: str,
        *,
        overlap: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.ratio, self.rope, self.overlap = entries.ratio, rope, overlap
        columns = entries.width * (1 + overlap)
        self.wkv = ReplicatedLinear(hidden_size, columns, bias=False, prefix=f"{prefix}.wkv")
        self.wgate = ReplicatedLinear(hidden_size, columns, bias=False, prefix=f"{prefix}.wgate")
        self.ape = empty_parameter(self.ratio, columns, dtype=torch.float32)
        set_weight_attrs(
            self.ape, {"weight_loader": default_weight_loader, "dummy_range": (-1.0, 1.0)}
        )
        self.norm = RMSNorm(entries.width, eps)
        self.tokens = RowCache(
            f"{prefix}.tokens",
            2 * columns,
            torch.float32,
            window=(1 + overlap) * self.ratio,
            decode_tokens=1 + overlap,
        )
        self.entries = entries

    @property
    def caches(self) -> list[RowCache]:
        return [self.tokens, self.entries]

    def token_rows(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """What each of `hidden_states [tokens, hidden]` leaves: `[tokens, 2 columns]` fp32."""
        value, score = (layer(hidden_states)[0].float() for layer in (self.wkv, self.wgate))
        return torch.cat([value, score + self.ape[positions % self.ratio]], dim=-1)

    def compress(self, run: int, positions: Tensor) -> None:
        """Write the entries that a run's tokens complete, whose rows are in the cache."""
        slots = get_forward_context().slot_mapping[self.tokens.layer_name]
        tokens = self.tokens.metadata().runs[run].tokens
        problem = CompressProblem(
            self.tokens.of_run(run),
            self.entries.of_run(run),
            positions[tokens],
            slots[tokens],
            self.ratio,
            self.overlap,
            self.norm.weight,
            self.norm.variance_epsilon,
            self.rope.cos_sin_cache,
        )
        current_platform.kernels.compress(problem)
