# SPDX-License-Identifier: Apache-2.0
"""What decode steps keep of tokens whose recurrent state is not written back yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class RingShape:
    """One layer's sizes: heads and head dimensions of this shard, and the dtype of its state."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    state_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """What updates of the state are computed in: fp32, fp64 for an fp64 state."""
        return torch.float64 if self.state_dtype == torch.float64 else torch.float32

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Keys, errors and decays of one token."""
        heads = self.num_v_heads
        return (self.num_k_heads, self.head_k_dim), (heads, self.head_v_dim), (heads,)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer."""
        return sum(prod(shape) for shape in self.token_shapes) * self.dtype.itemsize


@dataclass(frozen=True)
class DecodeRing:
    """One layer's uncommitted tokens: enough to make each token's state update again, bit by bit.

    A batch row has `slots` places, filled from 0 by its tokens since the last commit:
    `keys [rows, slots, k heads, dk]` l2-normalised, `errors [rows, slots, v heads, dv]`,
    `beta * (v - S^T k)`, and `decays [rows, slots, v heads]`, `exp(g)`; all fp32. The
    convolution's state is not deferred.

    `steps [max rows, 4]` int32 tells the step's decodes, in batch order: batch row, pending tokens,
    whether this step commits, 0. It has a fixed address and is shared by all layers. A step that
    does not commit needs a free slot.
    """

    steps: Tensor
    keys: Tensor
    errors: Tensor
    decays: Tensor

    @property
    def slots(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class RingStack:
    """The rings of a group's layers: `DecodeRing` with a leading layer dimension.

    `states`: each layer's `[blocks, v heads, dv, dk]`, equally strided views of one buffer;
    `offsets [layers]` int64: where they begin, in elements after the first.
    """

    steps: Tensor
    keys: Tensor
    errors: Tensor
    decays: Tensor
    states: Sequence[Tensor]
    offsets: Tensor

    def layer(self, index: int) -> DecodeRing:
        return DecodeRing(self.steps, self.keys[index], self.errors[index], self.decays[index])


class RingMemory:
    """The rings of `num_layers` equal layers, for `rows` batch rows of `slots` tokens each."""

    def __init__(
        self,
        shape: RingShape,
        num_layers: int,
        rows: int,
        slots: int,
        device: torch.device | str,
    ) -> None:
        self.keys, self.errors, self.decays = self.tensors = tuple(
            torch.zeros(num_layers, rows, slots, *inner, dtype=shape.dtype, device=device)
            for inner in shape.token_shapes
        )

    def stack(self, steps: Tensor, states: Sequence[Tensor]) -> RingStack:
        """`steps`: see `DecodeRing`; `states`: each layer's recurrent state."""
        first = states[0].storage_offset()
        offsets = torch.tensor([state.storage_offset() - first for state in states])
        return RingStack(
            steps, self.keys, self.errors, self.decays, states, offsets.to(steps.device)
        )


@dataclass(frozen=True)
class GatedNorm:
    """The gated norm of a decode's output (`Kernels.gated_rms_norm`): `gate [num_seqs, v heads,
    dv]` with any token stride, `weight [dv]`."""

    gate: Tensor
    weight: Tensor
    eps: float
