# SPDX-License-Identifier: Apache-2.0
"""The arguments of `look_up`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LookupProblem:
    """Takes in what a step sampled and proposes what may follow it.

    `history [rows, size]` int32: tokens of each batch row, of which `lengths [rows]` int32 count.
    `requests [k, 4]` int32 as in `AcceptProblem`: batch row and first sample of each request that
    sampled; its first `counts [k]` int32 of `sampled [samples]` int64 are output and go to the end
    of its history.

    Then its newest n tokens are looked up in its history: `least <= n <= most`, the longest n that
    came before, and of its places the first. Up to `num_drafts` tokens after that place become
    `tokens [rows, 1:]` int64, `drafts [rows]` int32 of them; those tokens may be among the newest
    themselves. Without a place `drafts` is 0. `best [rows]` int64 is scratch.
    """

    history: Tensor
    lengths: Tensor
    requests: Tensor
    sampled: Tensor
    counts: Tensor
    tokens: Tensor
    drafts: Tensor
    best: Tensor
    least: int
    most: int
    num_drafts: int
