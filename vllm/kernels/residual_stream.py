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


@dataclass(frozen=True)
class ResidualStream:
    """`residual + branch` rounded to the model dtype, both `[tokens, n]`.

    `branch` is what the norm that reads the stream has yet to add, or None.
    """

    residual: Tensor
    branch: Tensor | None = None


class NormKernels(Protocol):
    """The ops that norms of streams are made of: see `Kernels`."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> Tensor: ...

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]: ...


def normalise(kernels: NormKernels, stream: ResidualStream, norm: Norm) -> tuple[Tensor, Tensor]:
    """The stream's norm, and the stream added up; both `[tokens, n]`."""
    x, branch = stream.residual, stream.branch
    if branch is None:
        return kernels.rms_norm(x, norm.weight, norm.eps, one_plus=norm.one_plus), x
    return kernels.fused_add_rms_norm(branch, x, norm.weight, norm.eps, one_plus=norm.one_plus)
