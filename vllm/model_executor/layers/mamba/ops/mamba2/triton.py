# SPDX-License-Identifier: Apache-2.0
"""Mamba2 on GPUs: a launch for prefills; for decodes one of the convolution, one of the states."""

from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.mamba.ops.mamba2.chunk_scan import mamba2_prefill
from vllm.model_executor.layers.mamba.ops.mamba2.decode import mamba2_decode

__all__ = ["mamba2_commit", "mamba2_decode", "mamba2_prefill"]

mamba2_commit = run_commit
