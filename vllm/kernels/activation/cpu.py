# SPDX-License-Identifier: Apache-2.0
"""Products with an activated gate on the CPU: `csrc/cpu/kernels/norm.cpp`."""

from vllm._extension import cpu_ops

_ops = cpu_ops()
silu_and_mul = _ops.silu_and_mul.default
gelu_tanh_and_mul = _ops.gelu_tanh_and_mul.default
clamped_swiglu = _ops.clamped_swiglu.default
mul_sigmoid = _ops.mul_sigmoid.default
