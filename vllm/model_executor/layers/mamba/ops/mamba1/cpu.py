# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba on the CPU: the reference, and a record that it is slow."""

from vllm.model_executor.layers.mamba.ops.mamba1 import naive
from vllm.model_executor.layers.mamba.ops.slow_reference import slow_reference

mamba1_prefill = slow_reference(naive.mamba1_prefill, "Mamba on the CPU")
mamba1_decode = slow_reference(naive.mamba1_decode, "Mamba on the CPU")
mamba1_commit = naive.mamba1_commit
