# SPDX-License-Identifier: Apache-2.0
"""What the kernels of grouped Mamba are given."""

from dataclasses import dataclass

from torch import Tensor

from vllm.model_executor.layers.mamba.ops.problem import MambaDecode, MambaPrefill


@dataclass(frozen=True)
class Mamba1Gates:
    """What a scan needs besides its input. Channels are those of all heads, N of each.

    Of every token, with any token stride: `B [tokens, groups * N]`, `C [tokens, heads * N]` and
    `dt [tokens, channels]`; `A_log [channels, N]`, `dt_bias, D [channels]`. The step size is
    `softplus(dt + dt_bias)`, in fp32.
    """

    B: Tensor
    C: Tensor
    dt: Tensor
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor

    @property
    def heads_per_group(self) -> int:
        """Heads that share a B."""
        return self.C.shape[1] // self.B.shape[1]


class Mamba1Prefill(MambaPrefill[Mamba1Gates]):
    """`state [blocks, heads, N, N]` (head, channel in it, column), `out` like x."""


class Mamba1Decode(MambaDecode[Mamba1Gates]):
    """If there are fewer channels of the convolution than of all heads, a group's are repeated for
    its heads after it. A journal's keys are B, its errors step sizes times x, and its log rates
    `gates.A_log`."""


def repeat_groups(x: Tensor, channels: int, head_dim: int) -> Tensor:
    """`x [tokens, groups * head_dim]` for each head of a group, `[tokens, channels]`."""
    if x.shape[1] == channels:
        return x
    times = channels // x.shape[1]
    return x.unflatten(-1, (-1, head_dim)).repeat_interleave(times, dim=1).flatten(1)
