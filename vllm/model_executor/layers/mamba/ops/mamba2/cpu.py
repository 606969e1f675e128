# SPDX-License-Identifier: Apache-2.0
"""Mamba2 on the CPU: the reference, and a record that it is slow."""

from torch import Tensor

from vllm import decisions
from vllm.kernels.journal import JournalStack
from vllm.model_executor.layers.mamba.ops.mamba2 import naive
from vllm.model_executor.layers.mamba.ops.mamba2.problem import Mamba2Decode, Mamba2Prefill


def mamba2_prefill(problem: Mamba2Prefill) -> None:
    """See `naive.mamba2_prefill`."""
    _record()
    naive.mamba2_prefill(problem)


def mamba2_decode(problem: Mamba2Decode) -> None:
    """See `naive.mamba2_decode`."""
    _record()
    naive.mamba2_decode(problem)


def mamba2_commit(stack: JournalStack, entries: Tensor) -> None:
    """See `naive.mamba2_commit`."""
    naive.mamba2_commit(stack, entries)


def _record() -> None:
    why = "there are no C++ kernels for it; this is slow, token by token"
    decisions.record("Mamba2 on the CPU", "reference in torch", why)
