# SPDX-License-Identifier: Apache-2.0
"""Matmuls as torch has them: on the CPU by MKL or oneDNN, on a GPU by cuBLAS."""

from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x [tokens, k] @ weight [n, k].T + bias [n] -> [tokens, n]`, fp32 accumulation."""
    return nn.functional.linear(x, weight, bias)
