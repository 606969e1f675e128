# SPDX-License-Identifier: Apache-2.0
"""What the kernels of grouped Mamba are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.kernels.journal import Journal


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


@dataclass(frozen=True)
class Mamba1Prefill:
    """A ragged batch. `x [tokens, channels]` is the convolution's output; sequences and `state
    [blocks, heads, N, N]` (head, channel in it, column) as in `GdnPrefill`, `out` like x."""

    x: Tensor
    gates: Mamba1Gates
    state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    out: Tensor


@dataclass(frozen=True)
class Mamba1Decode:
    """Equally many tokens of each sequence. `x [tokens, conv channels]` is the raw projection,
    `conv_weight [conv channels, taps]`, `conv_bias [conv channels]` or None, `conv_state [blocks,
    taps - 1, conv channels]`. If there are fewer of these than channels, a group's are repeated for
    its heads after the convolution. The rest as in `Mamba1Prefill`. A journal's keys are B, its
    errors step sizes times x, and its log rates `gates.A_log`.

    Raises:
        ValueError: several tokens of a sequence, and no journal to keep those that may be rejected.
    """

    x: Tensor
    gates: Mamba1Gates
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
    def width(self) -> int:
        """Tokens of a sequence."""
        return len(self.x) // max(len(self.state_indices), 1)


def repeat_groups(x: Tensor, channels: int, head_dim: int) -> Tensor:
    """`x [tokens, groups * head_dim]` for each head of a group, `[tokens, channels]`."""
    if x.shape[1] == channels:
        return x
    times = channels // x.shape[1]
    return x.unflatten(-1, (-1, head_dim)).repeat_interleave(times, dim=1).flatten(1)
