# SPDX-License-Identifier: Apache-2.0
"""What the scans of Mamba1 and Mamba2 are given; `Gates` is what each kind needs besides."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from vllm.kernels.journal import Journal

Gates = TypeVar("Gates")


@dataclass(frozen=True)
class MambaPrefill(Generic[Gates]):
    """A ragged batch. `x [tokens, channels]` is the convolution's output; sequences are as in
    `GdnPrefill`."""

    x: Tensor
    gates: Gates
    state: Tensor
    state_indices: Tensor
    has_initial_state: Tensor
    query_start_loc: Tensor
    out: Tensor


@dataclass(frozen=True)
class MambaDecode(Generic[Gates]):
    """Equally many tokens of each sequence. `x [tokens, conv channels]` is the raw projection,
    `conv_weight [conv channels, taps]`, `conv_bias [conv channels]` or None, `conv_state [blocks,
    taps - 1, conv channels]`; the rest is as in the kind's prefill.

    Raises:
        ValueError: several tokens of a sequence, and no journal to keep those that may be rejected.
    """

    x: Tensor
    gates: Gates
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
