# SPDX-License-Identifier: Apache-2.0
"""The residual stream between a branch's last matmul and the next norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """An RMS norm's `weight [n]` and the rest of `Kernels.rms_norm`'s arguments."""

    weight: Tensor
    eps: float
    one_plus: bool


class RankSums(Protocol):
    """Adds up the parts that several ranks have of a branch, `[tokens, n]` each."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`."""
        ...

    def sum_add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`(norm(s), s)` with `s = sum(x) + residual`, in one launch."""
        ...


@dataclass(frozen=True)
class ResidualStream:
    """`residual + branch` rounded to the model dtype, both `[tokens, n]`.

    `branch` is what the norm that reads the stream has yet to add, or None. With `sums` it is this
    rank's part of it, and the norm adds up the parts, too.
    """

    residual: Tensor
    branch: Tensor | None = None
    sums: RankSums | None = None

    def reduced(self) -> ResidualStream:
        """With a branch whose parts are added up, for who has no use for `sums`."""
        if self.sums is None or self.branch is None:
            return self
        return ResidualStream(self.residual, self.sums.sum(self.branch))

    @property
    def total(self) -> Tensor:
        """The stream added up, for layers that start without a norm; nothing overwrites it."""
        branch = self.reduced().branch
        return self.residual if branch is None else self.residual + branch
