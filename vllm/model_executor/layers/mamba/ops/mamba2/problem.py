# SPDX-License-Identifier: Apache-2.0
"""What the kernels of Mamba2 are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.model_executor.layers.mamba.ops.problem import MambaDecode, MambaPrefill


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


class Mamba2Prefill(MambaPrefill[Mamba2Gates]):
    """`x [tokens, heads * P + 2 * groups * N]` is x, B and C, each head-major; `state [blocks,
    heads, P, N]`, `out [tokens, heads, P]`."""

    @property
    def sizes(self) -> Mamba2Sizes:
        return Mamba2Sizes.of(self.x.shape[1], self.state)


class Mamba2Decode(MambaDecode[Mamba2Gates]):
    """A journal's keys are B, its errors step sizes times x."""

    @property
    def sizes(self) -> Mamba2Sizes:
        return Mamba2Sizes.of(self.x.shape[1], self.state)
