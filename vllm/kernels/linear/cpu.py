# SPDX-License-Identifier: Apache-2.0
"""Matmuls on the CPU: `csrc/cpu/kernels/linear.cpp` for few rows, oneDNN for many."""

import torch
from torch import Tensor, nn

from vllm._extension import cpu_ops

#: rows up to which `skinny_linear` beats oneDNN (`benchmarks/cpu_kernels.py`)
_SKINNY_ROWS = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 16}

#: `(x [tokens, k], weight [n, k], bias [n] or None) -> [tokens, n]`, reading the weight once as
#: stored. A row's bits do not depend on the other rows. With fp32 `x` the weight may be float8
#: e4m3, which is widened on the way. Faster than `torch.nn.functional.linear` at any row count in
#: fp32, and up to about 16 rows in bf16 (`benchmarks/cpu_kernels.py`).
skinny_linear = cpu_ops().skinny_linear.default

# torch multiplies 16-bit matrices by oneDNN but fp32 ones by MKL, half as fast on AMD.
_onednn_linear = None
if torch.backends.mkldnn.is_available():
    _onednn_linear = torch.ops.mkldnn._linear_pointwise.default


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor
    if x.shape[0] <= _SKINNY_ROWS[x.dtype]:
        out = skinny_linear(x, weight, bias)
    elif x.dtype is torch.float32 and _onednn_linear is not None:
        out = _onednn_linear(x, weight, bias, "none", [], "")
    else:
        out = nn.functional.linear(x, weight, bias)
    return out
