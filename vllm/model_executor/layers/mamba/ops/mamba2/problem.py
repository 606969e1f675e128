# SPDX-License-Identifier: Apache-2.0
"""What the kernels of Mamba2 are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.kernels.journal import Journal


@dataclass(frozen=True)
class Mamba2Gates:
    """Step sizes of every token, and what does not depend on the token.

    `dt [tokens, heads]` is a projection, of any token stride; `A_log, dt_bias, D [heads]`. In fp32
    the step size is `clamp(softplus(dt + dt_bias), *dt_limit)`, the log decay `-exp(A_log)` times
    it, and `D` the weight of the token's own input.
    """

    dt: Tensor
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True)
class Mamba2Sizes:
    """Heads, groups of heads that share B and C, a head's channels P and its state's columns N."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int

    @classmethod
    def of(cls, channels: int, state: Tensor) -> Mamba2Sizes:
        """From the convolution's channels and a state `[blocks, heads, P, N]`."""
        heads, head_dim, state_size = state.shape[1:]
        return cls(heads, (channels - heads * head_dim) // (2 * state_size), head_dim, state_size)

    @property
    def sections(self) -> list[int]:
        """Channels of x, B and C."""
        shared = self.num_groups * self.state_size
        return [self.num_heads * self.head_dim, shared, shared]


@dataclass(frozen=True)
class Mamba2Prefill:
    """A ragged batch. `xbc [tokens, heads * P + 2 * groups * N]` is the convolution's output (x, B,
    C, each head-major); sequences and `state [blocks, heads, P, N]` as in `GdnPrefill`,
    `out [tokens, heads, P]`."""

    xbc: Tensor
    gates: Mamba2Gates
    state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    out: Tensor

    @property
    def sizes(self) -> Mamba2Sizes:
        return Mamba2Sizes.of(self.xbc.shape[1], self.state)


@dataclass(frozen=True)
class Mamba2Decode:
    """Equally many tokens of each sequence. `xbc` is the raw projection, `conv_weight [channels,
    taps]`, `conv_bias [channels]` or None, `conv_state [blocks, taps - 1, channels]`; the rest as
    in `Mamba2Prefill`. A journal's keys are B, its errors step sizes times x.

    Raises:
        ValueError: several tokens of a sequence, and no journal to keep those that may be rejected.
    """

    xbc: Tensor
    gates: Mamba2Gates
    conv_weight: Tensor
    conv_bias: Tensor | None
    conv_state: Tensor
    state: Tensor
    state_indices: Tensor
    out: Tensor
    journal: Journal | None = None

    def __post_init__(self) -> None:
        if self.journal is None and self.width > 1:
            raise ValueError(f"a decode of {self.width} tokens per sequence needs a journal")

    @property
    def sizes(self) -> Mamba2Sizes:
        return Mamba2Sizes.of(self.xbc.shape[1], self.state)

    @property
    def width(self) -> int:
        """Tokens of a sequence."""
        return len(self.xbc) // max(len(self.state_indices), 1)
