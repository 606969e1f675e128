# SPDX-License-Identifier: Apache-2.0
"""The residual stream between a branch's last matmul and the next norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """An RMS norm's `weight [n]` and the rest of `Kernels.rms_norm`'s arguments."""

    weight: Tensor
    eps: float
    one_plus: bool


@dataclass(frozen=True)
class ResidualStream:
    """`residual + branch` rounded to the model dtype, both `[tokens, n]`.

    `branch` is what the norm that reads the stream has yet to add, or None.
    """

    residual: Tensor
    branch: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The stream added up, for layers that start without a norm; nothing overwrites it."""
        return self.residual if self.branch is None else self.residual + self.branch
