# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state of fixed size per sequence."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_name
from vllm.v1.kv_cache_specs.base import KVCacheSpec, StateView, padded_size

#: Alignment in bytes of the parts of one recurrent layer's state.
STATE_ALIGNMENT = 16


class MambaAttentionBackendEnum(enum.Enum):
    """Kinds of recurrent layer; the value names the metadata its layers read."""

    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"
    LINEAR = "linear"
    GDN_ATTN = "gdn_attn"
    KDA_ATTN = "kda_attn"


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
        if not all(isinstance(shape, tuple) for shape in self.shapes):
            raise ValueError(
                f"state shapes {self.shapes} are no tuples, one for each state, as "
                "((64,),) for one vector of 64"
            )
        if not isinstance(self.dtypes, tuple):
            raise ValueError(
                f"state dtypes {self.dtypes} are no tuple with one for each state, as "
                "(torch.float32,)"
            )
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(
                f"{len(self.shapes)} state shapes, but {len(self.dtypes)} dtypes; give one for each"
            )
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
            start = cdiv(end, STATE_ALIGNMENT) * STATE_ALIGNMENT
            offsets.append(start)
            end = start + size
        return tuple(offsets)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one sequence's state: the sum of its tensors and their alignment."""
        return self.state_offsets[-1] + self.state_bytes[-1] if self.shapes else 0

    @property
    def page_size_bytes(self) -> int:
        return padded_size(self.real_page_size_bytes, self.page_size_padded)

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
            return cdiv(max_model_len, self.block_size) + self.num_speculative_blocks
        if self.mamba_cache_mode == "align":
            return 2 + self.num_speculative_blocks
        return 1 + self.num_speculative_blocks

    @property
    def _growth(self) -> tuple[object, ...]:
        return (*super()._growth, self.num_speculative_blocks)
