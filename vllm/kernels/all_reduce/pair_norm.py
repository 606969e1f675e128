# SPDX-License-Identifier: Apache-2.0
"""The norm of a stream whose branch two ranks have a part of: `csrc/cuda/pushes.cu`."""

import torch
from torch import Tensor

from vllm.kernels.all_reduce.cuda import NORM_COLUMNS, NORM_DTYPES
from vllm.kernels.residual_stream import Norm


def takes_pair(residual: Tensor) -> bool:
    """Whether `add_pair_norm` takes parts and a stream `[rows, columns]` like these."""
    few, most = NORM_COLUMNS
    return (
        residual.is_cuda
        and residual.dtype in NORM_DTYPES
        and few < residual.shape[1] <= most
        and residual.shape[1] % 8 == 0
    )


def add_pair_norm(
    own: Tensor, other: Tensor, residual: Tensor, norm: Norm, out: Tensor, total: Tensor
) -> None:
    """`total = own + other + residual` and its norm `out`, with the bits of separate kernels; all
    are dense `[rows, columns]`."""
    torch.ops.vllm_cuda.add_pair_norm.default(
        own, other, residual, norm.weight, norm.eps, norm.one_plus, out, total
    )
