# SPDX-License-Identifier: Apache-2.0
"""What decode steps keep of tokens that are not in their recurrent state's block yet.

Two reasons to wait: writing a state with every token would double what decoding reads and writes,
and a draft that may be rejected must leave nothing behind. A *rank-one update* of a state
(`S <- decay S + error key^T`) is kept in a place of its own until a later step commits it; a *raw
input* of a convolution until the next step, which knows whether its token was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class JournalShape:
    """One layer's sizes: heads and head dimensions of this shard, the dtype of its state, channels
    and dtype of its convolution's inputs, and whether each key channel has a decay of its own, or
    each element of the state (`Journal.log_rates`)."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    state_dtype: torch.dtype
    channels: int = 0
    input_dtype: torch.dtype = torch.float32
    channel_decay: bool = False
    element_decay: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What updates of the state are computed in: fp32, fp64 for an fp64 state."""
        return torch.float64 if self.state_dtype == torch.float64 else torch.float32

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Keys, errors and decays of one token."""
        heads = self.num_v_heads
        decays: tuple[int, ...] = (heads,)
        if self.channel_decay or self.element_decay:
            decays = (heads, self.head_k_dim if self.channel_decay else self.head_v_dim)
        return (self.num_k_heads, self.head_k_dim), (heads, self.head_v_dim), decays

    @property
    def token_bytes(self) -> int:
        """Bytes that one token's update of the state takes in one layer."""
        return sum(prod(shape) for shape in self.token_shapes) * self.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes that one token's raw input takes in one layer."""
        return self.channels * self.input_dtype.itemsize


@dataclass(frozen=True)
class JournalSize:
    """Places of a batch row. A step commits a row whose tokens would else exceed `most_pending`,
    and verifies up to `width` tokens, the drafts of which follow what is pending."""

    most_pending: int
    width: int = 1

    @classmethod
    def of(cls, commit_interval: int, width: int) -> JournalSize | None:
        """For rows that commit at least every `commit_interval` tokens and verify `width` of them;
        None where a step writes every state back, so that there is nothing to keep."""
        if commit_interval == width == 1:
            return None
        return cls(commit_interval - 1 + width - 1, width)

    @property
    def places(self) -> int:
        """Updates of the state."""
        return self.most_pending + self.width - 1

    @property
    def inputs(self) -> int:
        """Raw inputs: the drafts of one step."""
        return self.width - 1


@dataclass(frozen=True)
class Journal:
    """One layer's uncommitted tokens: enough to make each one's state update again, bit by bit.

    A batch row has `places`, used in a circle: `keys [rows, places, k heads, dk]` l2-normalised,
    `errors [rows, places, v heads, dv]`, `beta * (v - S^T k)`, and `decays [rows, places, v heads]`
    (or `[rows, places, v heads, dk]`), `exp(g)`; all fp32. `inputs [rows, width - 1, channels]`:
    what the row's last step convolved for its drafts.

    Where each element of a state decays at a rate of its own, `log_rates [v heads * dv, dk]` are
    the layer's, and `decays [rows, places, v heads, dv]` step sizes: an element's decay is
    `exp(-exp(log_rate) * step size)`.

    `steps [max rows, 4]` int32 tells the step's decodes, in batch order: batch row, pending tokens,
    whether this step commits, place of the first pending token; `taken [max rows]` int32, by batch
    row, how many `inputs` belong to accepted drafts. Both have a fixed address and are shared by
    all layers. A step of `width` tokens commits with the first of them, which is no draft; token
    `i` is then kept after the pending ones and those before it.
    """

    steps: Tensor
    taken: Tensor
    keys: Tensor
    errors: Tensor
    decays: Tensor
    inputs: Tensor
    log_rates: Tensor | None = None

    @property
    def places(self) -> int:
        return self.keys.shape[1]

    @property
    def width(self) -> int:
        """The most tokens of a sequence that a step verifies."""
        return self.inputs.shape[1] + 1

    @property
    def most_pending(self) -> int:
        """See `JournalSize`."""
        return self.places - self.inputs.shape[1]


@dataclass(frozen=True)
class JournalStack:
    """The journals of a group's layers: `Journal` with a leading layer dimension.

    `states`: each layer's `[blocks, v heads, dv, dk]`, `conv_states`: each layer's
    `[blocks, taps - 1, channels]`; each equally strided views of one buffer. `offsets, conv_offsets
    [layers]` int64: where they begin, in elements after the first. `pending, first [max rows]`
    int32 by batch row, as of the last step. `log_rates`: each layer's, if its kind has them.
    """

    steps: Tensor
    taken: Tensor
    pending: Tensor
    first: Tensor
    keys: Tensor
    errors: Tensor
    decays: Tensor
    inputs: Tensor
    states: Sequence[Tensor]
    offsets: Tensor
    conv_states: Sequence[Tensor]
    conv_offsets: Tensor
    log_rates: Sequence[Tensor] = ()

    def layer(self, index: int) -> Journal:
        return Journal(
            self.steps,
            self.taken,
            self.keys[index],
            self.errors[index],
            self.decays[index],
            self.inputs[index],
            self.log_rates[index] if self.log_rates else None,
        )


@dataclass(frozen=True)
class JournalMemory:
    """The journals of equal layers: `Journal`'s tensors with a leading layer dimension."""

    keys: Tensor
    errors: Tensor
    decays: Tensor
    inputs: Tensor

    @classmethod
    def create(
        cls,
        shape: JournalShape,
        num_layers: int,
        rows: int,
        size: JournalSize,
        device: torch.device | str,
    ) -> JournalMemory:
        """For `rows` batch rows of `num_layers` layers."""

        def zeros(count: int, *inner: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_layers, rows, count, *inner, dtype=dtype, device=device)

        keys, errors, decays = (
            zeros(size.places, *inner, dtype=shape.dtype) for inner in shape.token_shapes
        )
        return cls(
            keys, errors, decays, zeros(size.inputs, shape.channels, dtype=shape.input_dtype)
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.errors, self.decays, self.inputs

    def part(self, begin: int, end: int) -> JournalMemory:
        """The same memory, of some of the layers."""
        return JournalMemory(*(tensor[begin:end] for tensor in self.tensors))

    def stack(
        self,
        steps: Tensor,
        counts: tuple[Tensor, Tensor, Tensor],
        states: Sequence[Tensor],
        conv_states: Sequence[Tensor],
        log_rates: Sequence[Tensor] = (),
    ) -> JournalStack:
        """`steps`: see `Journal`; `counts`: pending, first and taken of every batch row;
        `states, conv_states, log_rates`: each layer's."""
        pending, first, taken = counts
        return JournalStack(
            steps,
            taken,
            pending,
            first,
            self.keys,
            self.errors,
            self.decays,
            self.inputs,
            states,
            _offsets(states),
            conv_states,
            _offsets(conv_states),
            log_rates,
        )


def _offsets(views: Sequence[Tensor]) -> Tensor:
    """Where each of several views of one buffer begins, in elements after the first."""
    first = views[0].storage_offset()
    offsets = torch.tensor([view.storage_offset() - first for view in views])
    return offsets.to(views[0].device)


@dataclass(frozen=True)
class GatedNorm:
    """The gated norm of a decode's output (`Kernels.gated_rms_norm`): `gate [tokens, v heads, dv]`
    with any token stride, `weight [dv]`."""

    gate: Tensor
    weight: Tensor
    eps: float
