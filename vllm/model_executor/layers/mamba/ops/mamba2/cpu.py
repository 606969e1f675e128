# SPDX-License-Identifier: Apache-2.0
"""Mamba2 on the CPU: the reference, and a record that it is slow."""

from vllm.model_executor.layers.mamba.ops.mamba2 import naive
from vllm.model_executor.layers.mamba.ops.slow_reference import slow_reference

mamba2_prefill = slow_reference(naive.mamba2_prefill, "Mamba2 on the CPU")
mamba2_decode = slow_reference(naive.mamba2_decode, "Mamba2 on the CPU")
mamba2_commit = naive.mamba2_commit
