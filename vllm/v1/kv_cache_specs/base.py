# SPDX-License-Identifier: Apache-2.0
"""What one layer keeps, and what its kind answers about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Spec = TypeVar("Spec", bound="KVCacheSpec")


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
    def tokens_per_row(self) -> int:
        """`n`: row `i` of a block stands for its tokens `i * n` to `(i + 1) * n - 1`, and is there
        once the last of them is."""
        return self.block_size // self.storage_block_size

    @property
    def window(self) -> int | None:
        """Tokens at the end that the layer keeps; None: all."""
        return None

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens after its own that a row depends on: a prefix can be continued only if so many
        tokens after it are the same as well."""
        return 0

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
        return cdiv(num_tokens, self.block_size)

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
        return the_one(specs)

    @property
    def _growth(self) -> tuple[object, ...]:
        """What decides how the block list grows with the sequence."""
        return (type(self), self.block_size, self.window)

    def is_uniform_with_collection(self, specs: dict[str, KVCacheSpec]) -> bool:
        """Whether every spec of `specs` grows with the sequence exactly as this one does."""
        return all(spec._growth == self._growth for spec in specs.values())


def the_one(specs: Sequence[Spec]) -> Spec:
    """`specs[0]`; `ValueError` unless all are equal."""
    first = specs[0]
    if any(type(spec) is not type(first) or spec != first for spec in specs):
        raise ValueError(f"layers of one group need equal specs, got {set(specs)}")
    return first


def padded_size(real_bytes: int, padded_bytes: int | None) -> int:
    """Bytes to reserve; `ValueError` for fewer than there are."""
    if padded_bytes is None:
        return real_bytes
    if padded_bytes < real_bytes:
        raise ValueError(f"page_size_padded {padded_bytes} is below the real size {real_bytes}")
    return padded_bytes
