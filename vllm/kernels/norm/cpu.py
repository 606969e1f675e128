# SPDX-License-Identifier: Apache-2.0
"""Norms on the CPU: `csrc/cpu/kernels/norm.cpp`."""

from torch import Tensor

from vllm._extension import cpu_ops
from vllm.kernels.norm.naive import put_rows

_ops = cpu_ops()
_rms_norm = _ops.rms_norm.default
_fused_add_rms_norm = _ops.fused_add_rms_norm.default
_gated_rms_norm = _ops.gated_rms_norm.default


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
    return _rms_norm(x, weight, eps, one_plus)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    return _fused_add_rms_norm(x, residual, weight, eps, one_plus)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    done: Tensor | None = None,
) -> Tensor:
    normed: Tensor = _gated_rms_norm(x, gate, weight, eps)
    return normed if out is None else put_rows(out, normed.view(out.shape), done).flatten(1)
