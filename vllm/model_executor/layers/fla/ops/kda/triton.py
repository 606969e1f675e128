# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention on GPUs: one launch per op, two for prefills."""

from torch import Tensor

from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.fla.ops.gated_delta_rule.commit import run_commit
from vllm.model_executor.layers.fla.ops.kda.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.kda.decode import run_decode
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaPrefill


def kda_prefill(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`."""
    run_chunked(problem)


def kda_decode(problem: KdaDecode) -> None:
    """See `naive.kda_decode`."""
    run_decode(problem)


def kda_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `naive.kda_commit`."""
    run_commit(stack, entries)
