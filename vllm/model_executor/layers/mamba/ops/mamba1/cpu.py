# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba on the CPU: the reference, and a record that it is slow."""

from torch import Tensor

from vllm import decisions
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.mamba.ops.mamba1 import naive
from vllm.model_executor.layers.mamba.ops.mamba1.problem import Mamba1Decode, Mamba1Prefill


def mamba1_prefill(problem: Mamba1Prefill) -> None:
    """See `naive.mamba1_prefill`."""
    _record()
    naive.mamba1_prefill(problem)


def mamba1_decode(problem: Mamba1Decode) -> None:
    """See `naive.mamba1_decode`."""
    _record()
    naive.mamba1_decode(problem)


def mamba1_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `naive.mamba1_commit`."""
    naive.mamba1_commit(stack, entries)


def _record() -> None:
    why = "there are no C++ kernels for it; this is slow, token by token"
    decisions.record("Mamba on the CPU", "reference in torch", why)
