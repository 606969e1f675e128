# SPDX-License-Identifier: Apache-2.0
"""Layers that keep rows per token: keys and values, latents, captured hidden states."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_name
from vllm.v1.kv_cache_specs.base import KVCacheSpec, Spec, StateView, padded_size, the_one


class KVQuantMode(enum.IntEnum):
    """How keys and values are quantised inside the cache."""

    NONE = 0


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys, then values of one attention layer: `[2, block_size, num_kv_heads, head_size]`.

    `page_size_padded`: bytes to reserve per block, at least the real size.
    `lookahead`: see `num_lookahead_tokens`.
    `indexes_kv_by_block_stride`: the kernels take the block stride from the tensor; always true
    of this package's kernels, kept for layers that come from elsewhere.
    """

    kind: ClassVar[str] = "full_attention"

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    indexes_kv_by_block_stride: bool = False
    lookahead: int = 0

    @property
    def num_lookahead_tokens(self) -> int:
        return self.lookahead

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block's data without padding."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return padded_size(self.real_page_size_bytes, self.page_size_padded)

    @property
    def label(self) -> str:
        return "drafter's attention" if self.lookahead else "attention"

    @property
    def contents(self) -> str:
        return f"{self.num_kv_heads} heads x {self.head_size} {dtype_name(self.dtype)}"

    @property
    def views(self) -> tuple[StateView, ...]:
        shape = (2, self.block_size, self.num_kv_heads, self.head_size)
        return (StateView(shape, self.dtype, token_dim=1),)

    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        return self.blocks_for(max_model_len)

    def _as_full(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            kv_quant_mode=self.kv_quant_mode,
            page_size_padded=self.page_size_padded,
            indexes_kv_by_block_stride=self.indexes_kv_by_block_stride,
            lookahead=self.lookahead,
        )


@dataclass(frozen=True, kw_only=True)
class KeysAndValuesSpec(AttentionSpec):
    """An attention layer that the arena can keep.

    `head_size_v`: the values' width, `head_size` when not given.
    """

    head_size_v: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        width = self.head_size + self.head_size_v
        return self.block_size * self.num_kv_heads * width * self.dtype.itemsize

    @property
    def contents(self) -> str:
        if self.head_size_v == self.head_size:
            return super().contents
        sizes = f"({self.head_size} keys, {self.head_size_v} values)"
        return f"{self.num_kv_heads} heads x {sizes} {dtype_name(self.dtype)}"

    @property
    def views(self) -> tuple[StateView, ...]:
        """One tensor of keys and values, or one of each where their widths differ."""
        if self.head_size_v == self.head_size:
            return super().views
        rows = (self.block_size, self.num_kv_heads)
        keys, values = (*rows, self.head_size), (*rows, self.head_size_v)
        return (
            StateView(keys, self.dtype, token_dim=0),
            StateView(values, self.dtype, prod(keys) * self.dtype.itemsize, token_dim=0),
        )

    def refusal(self, block_size: int) -> str | None:
        if self.block_size % block_size == 0:
            return None
        return (
            f"its spec has {self.block_size} tokens per block, which is no multiple of "
            f"--block-size ({block_size}), in which prefixes are hashed"
        )


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KeysAndValuesSpec):
    """A layer that keeps every token.

    `sliding_window`, `attention_chunk_size`: noted for layers that attend to less than they keep.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @classmethod
    def merge(cls: type[Spec], specs: Sequence[Spec]) -> Spec:
        """As the base, but layers may differ in `sliding_window` where all others keep everything.

        Raises `ValueError` for two different windows or any other difference.
        """
        full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
        windows = {spec.sliding_window for spec in full} - {None}
        if len(full) != len(specs) or len(windows) > 1:
            raise ValueError(f"layers of one group need one sliding window, got {set(specs)}")
        the_one([replace(spec, sliding_window=None) for spec in full])
        return replace(specs[0], sliding_window=windows.pop() if windows else None)  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KeysAndValuesSpec):
    """A layer whose queries see the last `sliding_window` tokens, themselves included."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def label(self) -> str:
        whose = "drafter's " if self.lookahead else ""
        return f"{whose}sliding window {self.sliding_window}"

    def keeping_every_token(self) -> KVCacheSpec:
        full = self._as_full()
        return replace(full, head_size_v=self.head_size_v, sliding_window=self.sliding_window)

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Window plus one step's tokens, and one more block since a window starts anywhere."""
        tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1

    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        return self.max_admission_blocks_per_request(max_num_batched_tokens, max_model_len)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer whose queries see their own chunk of `attention_chunk_size` tokens."""

    kind: ClassVar[str] = "chunked_local_attention"

    attention_chunk_size: int

    @property
    def _growth(self) -> tuple[object, ...]:
        return (*super()._growth, self.attention_chunk_size)

    def keeping_every_token(self) -> KVCacheSpec:
        return replace(self._as_full(), attention_chunk_size=self.attention_chunk_size)

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return cdiv(tokens, self.block_size)

    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        return self.max_admission_blocks_per_request(max_num_batched_tokens, max_model_len)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Latent attention: one tensor `[storage_block_size, num_kv_heads * head_size]`, no values.

    `compress_ratio`: tokens per stored row. `alignment`: the block's bytes are rounded up to a
    multiple of it. `cache_dtype_str`, `model_version`: noted for the backend.
    """

    kind: ClassVar[str] = "mla_attention"

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % self.compress_ratio:
            raise ValueError(
                f"block_size {self.block_size} is no multiple of compress_ratio "
                f"{self.compress_ratio}, and a block keeps whole rows; choose a multiple"
            )

    @property
    def storage_block_size(self) -> int:
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        size = self.storage_block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return cdiv(size, self.alignment) * self.alignment if self.alignment else size

    @property
    def label(self) -> str:
        if self.compress_ratio > 1:
            return f"entries of {self.compress_ratio} tokens"
        return "latent attention"

    @property
    def contents(self) -> str:
        return f"{self.num_kv_heads} rows x {self.head_size} {dtype_name(self.dtype)}"

    @property
    def views(self) -> tuple[StateView, ...]:
        shape = (self.storage_block_size, self.num_kv_heads * self.head_size)
        return (StateView(shape, self.dtype, token_dim=0),)

    @classmethod
    def merge(cls: type[Spec], specs: Sequence[Spec]) -> Spec:
        """The one spec that serves all of `specs`; `ValueError` unless all are equal."""
        return the_one(specs)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A window of rows that all heads share, keys and values at once: one tensor `[block_size,
    num_kv_heads * head_size]`, no values."""

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def contents(self) -> str:
        return f"{self.num_kv_heads} rows x {self.head_size} {dtype_name(self.dtype)}"

    @property
    def views(self) -> tuple[StateView, ...]:
        shape = (self.block_size, self.num_kv_heads * self.head_size)
        return (StateView(shape, self.dtype, token_dim=0),)

    def keeping_every_token(self) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            page_size_padded=self.page_size_padded,
            lookahead=self.lookahead,
            sliding_window=self.sliding_window,
        )


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Marks the layer that keeps captured hidden states, `[block_size, num_kv_heads, head_size]`.

    `num_kv_heads`: captured layers; `head_size`: the hidden size. Never merged with a layer of
    another type.
    """

    kind: ClassVar[str] = "hidden_states"
    is_hidden_states: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "hidden states"

    @property
    def views(self) -> tuple[StateView, ...]:
        shape = (self.block_size, self.num_kv_heads, self.head_size)
        return (StateView(shape, self.dtype, token_dim=0),)
