# SPDX-License-Identifier: Apache-2.0
"""What the kernels of Kimi delta attention are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.kernels.journal import Journal
from vllm.utils.math_utils import next_power_of_2


@dataclass(frozen=True)
class KdaGates:
    """Of every token, decays and the strength of its update.

    `a [tokens, heads, dk]` and `b [tokens, heads]` are projections, with dense heads and any token
    stride; `A_log [heads]`, `dt_bias [heads, dk]`. `beta = sigmoid(b)` and, for each key channel,
    `g = -exp(A_log) * softplus(a + dt_bias)`, in fp32.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class KdaPrefill:
    """A ragged batch. `qkv [tokens, heads * (2 dk + dv)]` is the convolution's output; sequences,
    their chunks and `state [blocks, heads, dv, dk]` as in `GdnPrefill`, `out [tokens, heads, dv]`.
    """

    qkv: Tensor
    gates: KdaGates
    state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    out: Tensor

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, dk and dv."""
        heads, dv, dk = self.state.shape[1:]
        return heads, heads, dk, dv

    @property
    def block_k(self) -> int:
        """Channels of the kernels' tiles of keys: Triton's products need 64 on sm_90."""
        return max(64, next_power_of_2(self.state.shape[3]))

    @property
    def block_v(self) -> int:
        """As `block_k`, of values."""
        return max(64, next_power_of_2(self.state.shape[2]))


@dataclass(frozen=True)
class KdaDecode:
    """Equally many tokens of each sequence. `qkv [tokens, heads * (2 dk + dv)]` is the raw
    projection, `conv_weight [channels, taps]`, `conv_state [blocks, taps - 1, channels]`; the rest
    as in `KdaPrefill`.

    Raises:
        ValueError: several tokens of a sequence, and no journal to keep those that may be rejected.
    """

    qkv: Tensor
    gates: KdaGates
    conv_weight: Tensor
    conv_state: Tensor
    state: Tensor
    state_indices: Tensor
    out: Tensor
    journal: Journal | None = None

    def __post_init__(self) -> None:
        if self.journal is None and self.width > 1:
            raise ValueError(f"a decode of {self.width} tokens per sequence needs a journal")

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, dk and dv."""
        heads, dv, dk = self.state.shape[1:]
        return heads, heads, dk, dv

    @property
    def width(self) -> int:
        """Tokens of a sequence."""
        return len(self.qkv) // max(len(self.state_indices), 1)
