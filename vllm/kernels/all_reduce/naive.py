# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks in plain torch, by one who has all the parts: what every rank computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm.kernels.norm.naive import accumulation_dtype, rms_norm
from vllm.kernels.residual_stream import Norm


def sum_ranks(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' parts, `[rows, columns]` each: added in fp32 in the order of ranks,
    rounded once."""
    first, *others = parts
    total = first.to(accumulation_dtype(first))
    for part in others:
        total = total + part
    return total.to(first.dtype)


def sum_ranks_add_norm(
    parts: Sequence[Tensor], residual: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(s), s)` with `s = sum_ranks(parts) + residual`, each rounded to the parts' dtype;
    all `[rows, columns]`."""
    total = sum_ranks(parts) + residual
    return rms_norm(total, norm.weight, norm.eps, one_plus=norm.one_plus), total
