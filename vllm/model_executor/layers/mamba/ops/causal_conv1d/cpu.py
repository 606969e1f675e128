# SPDX-License-Identifier: Apache-2.0
"""Causal convolution on the CPU: `csrc/cpu/kernels/conv1d.cpp`."""

from vllm._extension import cpu_ops

causal_conv1d = cpu_ops().causal_conv1d.default
