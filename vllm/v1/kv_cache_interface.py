# SPDX-License-Identifier: Apache-2.0
"""What each layer keeps between steps (specs), and where it lies in the page arena (plans).

Vocabulary and byte layout: docs/state_memory.md.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from vllm.utils.torch_utils import dtype_name
from vllm.v1.core.arena_plan import ArenaPlan as ArenaPlan
from vllm.v1.core.arena_plan import GroupPlan as GroupPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Alignment in bytes of the parts of one recurrent layer's state.
STATE_ALIGNMENT = 16

Spec = TypeVar("Spec", bound="KVCacheSpec")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class KVQuantMode(enum.IntEnum):
    """How keys and values are quantised inside the cache."""

    NONE = 0


class MambaAttentionBackendEnum(enum.Enum):
    """Kinds of recurrent layer; the value names the metadata its layers read."""

    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"
    LINEAR = "linear"
    GDN_ATTN = "gdn_attn"
    KDA_ATTN = "kda_attn"


@dataclass(frozen=True)
class StateView:
    """One tensor that a layer keeps in each block.

    `shape` without the block dimension; `offset`: its first byte in the layer's part of the block;
    `token_dim`: the dimension of `shape` that counts tokens, None for a recurrent state.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    token_dim: int | None = None


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """What one layer keeps. Frozen: layers with equal specs share a group.

    `block_size`: tokens per block of this layer's group. Code that differs between kinds of layer
    asks the spec, never for its class: `kind` names the kind (in KV events, and to find its cache
    manager); `is_recurrent` layers keep a state per sequence, the others rows per token;
    `is_hidden_states`: the rows are captured hidden states.
    """

    kind: ClassVar[str]
    is_recurrent: ClassVar[bool] = False
    is_hidden_states: ClassVar[bool] = False

    block_size: int

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes this layer takes in one block of its group, padding included."""

    @property
    def storage_block_size(self) -> int:
        """Rows stored per block (`block_size` unless the layer compresses tokens)."""
        return self.block_size

    @property
    def window(self) -> int | None:
        """Tokens at the end that the layer keeps; None: all."""
        return None

    @property
    def label(self) -> str:
        """The kind of layer, in words."""
        return self.kind

    @property
    def contents(self) -> str:
        """The state of one layer, in words."""
        return f"{self.page_size_bytes} bytes per block"

    @property
    def views(self) -> tuple[StateView, ...]:
        """What lies in the layer's part of a block; NotImplementedError for a kind without it."""
        raise NotImplementedError(f"the arena has no view of {type(self).__name__}")

    def refusal(self, block_size: int) -> str | None:
        """Why the arena cannot keep this state; None if it can. `block_size`: of paged layers."""
        return (
            f"no cache manager for {type(self).__name__}; supported are full and sliding-window "
            "attention, MLA, hidden states and recurrent state"
        )

    def of_layer(self, name: str) -> KVCacheSpec:
        """The spec of one layer of the group that has this one."""
        return self

    def keeping_every_token(self) -> KVCacheSpec:
        """The spec of the same layer if no token may be dropped; itself where none is."""
        return self

    @classmethod
    def expect(cls: type[Spec], spec: KVCacheSpec) -> Spec:
        """`spec`, for code that serves layers of this class only; `TypeError` for another."""
        if not isinstance(spec, cls):
            raise TypeError(f"expected {cls.__name__}, got {type(spec).__name__}")
        return spec

    def blocks_for(self, num_tokens: int) -> int:
        """Length of the block list of a request with `num_tokens` tokens, dropped ones included."""
        return _ceil_div(num_tokens, self.block_size)

    @abstractmethod
    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Most blocks one request of `max_model_len` tokens is ever admitted with."""

    def blocks_per_request(self, max_num_batched_tokens: int, num_tokens: int) -> int:
        """Most blocks a request holds at once on its way to `num_tokens` tokens (> 0)."""
        most = self.max_blocks_per_request(max_num_batched_tokens, num_tokens)
        return min(most, self.blocks_for(num_tokens))

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes this layer needs for one request of the longest length the model serves."""
        assert vllm_config.model_config is not None
        blocks = self.max_blocks_per_request(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len,
        )
        return blocks * self.page_size_bytes

    def copy_with_new_block_size(self: Spec, block_size: int) -> Spec:
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls: type[Spec], specs: Sequence[Spec]) -> Spec:
        """The one spec that serves all of `specs`; `ValueError` unless all are equal."""
        return _the_one(specs)

    @property
    def _growth(self) -> tuple[object, ...]:
        """What decides how the block list grows with the sequence."""
        return (type(self), self.block_size, self.window)

    def is_uniform_with_collection(self, specs: dict[str, KVCacheSpec]) -> bool:
        """Whether every spec of `specs` grows with the sequence exactly as this one does."""
        return all(spec._growth == self._growth for spec in specs.values())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys, then values of one attention layer: `[2, block_size, num_kv_heads, head_size]`.

    `page_size_padded`: bytes to reserve per block, at least the real size.
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

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block's data without padding."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return _padded(self.real_page_size_bytes, self.page_size_padded)

    @property
    def label(self) -> str:
        return "attention"

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

    def refusal(self, block_size: int) -> str | None:
        if self.block_size == block_size:
            return None
        return (
            f"its spec has {self.block_size} tokens per block, but every paged layer must use "
            f"--block-size ({block_size})"
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
        _the_one([replace(spec, sliding_window=None) for spec in full])
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
        return f"sliding window {self.sliding_window}"

    def keeping_every_token(self) -> KVCacheSpec:
        full = self._as_full()
        return replace(full, head_size_v=self.head_size_v, sliding_window=self.sliding_window)

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Window plus one step's tokens, and one more block since a window starts anywhere."""
        tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        return _ceil_div(tokens, self.block_size) + 1

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
        return _ceil_div(tokens, self.block_size)

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
                f"block_size {self.block_size} is no multiple of "
                f"compress_ratio {self.compress_ratio}"
            )

    @property
    def storage_block_size(self) -> int:
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        size = self.storage_block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return _ceil_div(size, self.alignment) * self.alignment if self.alignment else size

    @property
    def label(self) -> str:
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
        return _the_one(specs)


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


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """Any recurrent layer: `shapes`, `dtypes` of its state tensors, convolution state first.

    Modes (`mamba_cache_mode`): `none` keeps one state per request. `num_speculative_blocks`:
    further states per request for draft tokens.
    """

    kind: ClassVar[str] = "mamba"
    is_recurrent: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_type: MambaAttentionBackendEnum = MambaAttentionBackendEnum.MAMBA2
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(f"{len(self.shapes)} state shapes but {len(self.dtypes)} dtypes")
        if self.mamba_cache_mode not in ("none", "align", "all"):
            raise ValueError(f"unknown mamba_cache_mode {self.mamba_cache_mode!r}")

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of each state tensor of one sequence."""
        return tuple(
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """Byte offset of each state tensor in the layer's part of a block, 16-byte aligned."""
        offsets, end = [], 0
        for size in self.state_bytes:
            start = _ceil_div(end, STATE_ALIGNMENT) * STATE_ALIGNMENT
            offsets.append(start)
            end = start + size
        return tuple(offsets)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one sequence's state: the sum of its tensors and their alignment."""
        return self.state_offsets[-1] + self.state_bytes[-1] if self.shapes else 0

    @property
    def page_size_bytes(self) -> int:
        return _padded(self.real_page_size_bytes, self.page_size_padded)

    @property
    def label(self) -> str:
        return f"recurrent ({self.mamba_type.value})"

    @property
    def contents(self) -> str:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return " + ".join(f"{list(shape)} {dtype_name(dtype)}" for shape, dtype in pairs)

    @property
    def views(self) -> tuple[StateView, ...]:
        return tuple(map(StateView, self.shapes, self.dtypes, self.state_offsets))

    def refusal(self, block_size: int) -> str | None:
        if self.mamba_cache_mode == "none":
            return None
        return (
            f"mamba_cache_mode {self.mamba_cache_mode!r} is not supported; the arena keeps one "
            "state per request, use 'none'"
        )

    def blocks_for(self, num_tokens: int) -> int:
        return 1 + self.num_speculative_blocks

    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        if self.mamba_cache_mode == "all":
            return _ceil_div(max_model_len, self.block_size) + self.num_speculative_blocks
        if self.mamba_cache_mode == "align":
            return 2 + self.num_speculative_blocks
        return 1 + self.num_speculative_blocks

    @property
    def _growth(self) -> tuple[object, ...]:
        return (*super()._growth, self.num_speculative_blocks)


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that grow alike but differ in size, by name; read by connectors.

    The arena never needs it: its groups hold layers of one spec.
    """

    kind: ClassVar[str] = "uniform"

    kv_cache_specs: dict[str, KVCacheSpec] = field(hash=False)

    def of_layer(self, name: str) -> KVCacheSpec:
        return self.kv_cache_specs[name]

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_blocks_per_request(self, max_num_batched_tokens: int, max_model_len: int) -> int:
        return max(
            spec.max_blocks_per_request(max_num_batched_tokens, max_model_len)
            for spec in self.kv_cache_specs.values()
        )


def _the_one(specs: Sequence[Spec]) -> Spec:
    first = specs[0]
    if any(type(spec) is not type(first) or spec != first for spec in specs):
        raise ValueError(f"layers of one group need equal specs, got {set(specs)}")
    return first


def _padded(real_bytes: int, padded_bytes: int | None) -> int:
    if padded_bytes is None:
        return real_bytes
    if padded_bytes < real_bytes:
        raise ValueError(f"page_size_padded {padded_bytes} is below the real size {real_bytes}")
    return padded_bytes


@dataclass
class KVCacheTensor:
    """Where the layers in `shared_by` lie in the arena.

    Their block `b` starts at byte `offset + b * block_stride`; `size` counts the bytes of all
    their blocks, without what lies between. Entries of different groups overlap: a page belongs
    to one group at a time.
    """

    size: int
    shared_by: list[str]
    offset: int = 0
    block_stride: int = 0


@dataclass
class KVCacheGroupSpec:
    """Layers with one spec and one block table, in layer order."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False

    @property
    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """Every layer's own spec."""
        return {name: self.kv_cache_spec.of_layer(name) for name in self.layer_names}


@dataclass
class KVCacheConfig:
    """Everything workers and scheduler know about state memory.

    `num_blocks` counts arena pages (with a single group a page is one block).
    """

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    plan: ArenaPlan

    @property
    def has_mamba_layers(self) -> bool:
        return any(group.kv_cache_spec.is_recurrent for group in self.kv_cache_groups)
