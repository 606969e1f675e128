# SPDX-License-Identifier: Apache-2.0
"""Compressed attention by the reference, and a record that it is slow."""

from vllm import decisions
from vllm.kernels.compressed_attention import (
    ChooseProblem,
    CompressedAttentionProblem,
    CompressProblem,
    naive,
)


def compress(p: CompressProblem) -> None:
    """See `naive.compress`."""
    _record()
    naive.compress(p)


def choose_entries(p: ChooseProblem) -> None:
    """See `naive.choose_entries`."""
    _record()
    naive.choose_entries(p)


def compressed_attention(p: CompressedAttentionProblem) -> None:
    """See `naive.compressed_attention`."""
    _record()
    naive.compressed_attention(p)


def _record() -> None:
    why = "there are no kernels of it yet; every token gathers what it may see, which is slow"
    decisions.record("compressed attention", "reference in torch", why)
