# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention on the CPU: the reference, and a record that it is slow."""

from torch import Tensor

from vllm import decisions
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.fla.ops.kda import naive
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaPrefill


def kda_prefill(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`."""
    _record()
    naive.kda_prefill(problem)


def kda_decode(problem: KdaDecode) -> None:
    """See `naive.kda_decode`."""
    _record()
    naive.kda_decode(problem)


def kda_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `naive.kda_commit`."""
    naive.kda_commit(stack, entries)


def _record() -> None:
    why = "its C++ kernels have one decay per head; this is slow, token by token"
    decisions.record("Kimi delta attention on the CPU", "reference in torch", why)
