# SPDX-License-Identifier: Apache-2.0
"""Mamba2 on GPUs: a launch for prefills; for decodes one of the convolution, one of the states."""

from torch import Tensor

from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.mamba.ops.mamba2.chunk_scan import run_chunk_scan
from vllm.model_executor.layers.mamba.ops.mamba2.decode import run_decode
from vllm.model_executor.layers.mamba.ops.mamba2.problem import Mamba2Decode, Mamba2Prefill


def mamba2_prefill(problem: Mamba2Prefill) -> None:
    """See `naive.mamba2_prefill`."""
    run_chunk_scan(problem)


def mamba2_decode(problem: Mamba2Decode) -> None:
    """See `naive.mamba2_decode`."""
    run_decode(problem)


def mamba2_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `naive.mamba2_commit`."""
    run_commit(stack, entries)
