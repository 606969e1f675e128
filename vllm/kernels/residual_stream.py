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


class BranchParts(Protocol):
    """A branch `[tokens, n]` in parts that are yet to be added up: of ranks, or of experts."""

    def sum(self) -> Tensor:
        """The branch, rounded to the model dtype."""
        ...

    def sum_add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`(norm(s), s)` with `s = sum() + residual`, in one launch with the bits of several."""
        ...


@dataclass(frozen=True)
class ResidualStream:
    """`residual + branch` rounded to the model dtype, both `[tokens, n]`.

    `branch` is what the norm that reads the stream has yet to add, or None; of parts the norm adds
    up these, too.
    """

    residual: Tensor
    branch: Tensor | BranchParts | None = None

    @property
    def added_branch(self) -> Tensor | None:
        """The branch with its parts added up, for who reads it by itself."""
        branch = self.branch
        return branch if branch is None or isinstance(branch, Tensor) else branch.sum()

    @property
    def total(self) -> Tensor:
        """The stream added up, for layers that start without a norm; nothing overwrites it."""
        branch = self.added_branch
        return self.residual if branch is None else self.residual + branch
