# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Tokens sorted by expert, in blocks of rows that have one expert each.

A pair is a token with one of its slots, numbered `token * slots + slot`. Pairs are ordered by
expert, then by number; every expert's run starts at a block. How many blocks there may be follows
from host integers alone, so a captured graph holds whatever the routing is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

#: pairs that one program places, where there are at most so many of them, and else
CHUNKS = ((512, 64), (4096, 128))
MOST = 512
#: chunks whose counts are added at once, and blocks that are given their experts at once
_ROWS = 16
#: pairs compared with a chunk's at once
_COMPARED = 32


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `rows` places.

    `pairs [count * rows]` int32: a place's pair; `experts [count]` int32, -1 for blocks that are
    not used; `ends [experts]` int32: the first place behind each expert's pairs. What lies between
    an expert's end and its last block's is unspecified.
    """

    rows: int
    count: int
    pairs: Tensor
    experts: Tensor
    ends: Tensor


def most_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """Blocks that any routing of so many pairs fits in."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


@triton.jit
def _load_experts(experts_ptr, pair, num_pairs, stride, SLOTS: tl.constexpr):
    """Of pairs; -1 for those that do not exist."""
    exists = pair < num_pairs
    at = (pair // SLOTS).to(tl.int64) * stride + pair % SLOTS
    return tl.load(experts_ptr + at, mask=exists, other=-1)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts_ptr, counts_ptr, num_pairs, stride,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Pairs of every expert in this program's chunk."""
    start_next(PDL)
    await_previous(PDL)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = _load_experts(experts_ptr, pair, num_pairs, stride, SLOTS)
    known = (expert >= 0) & (expert < EXPERTS)
    counts = tl.histogram(tl.where(known, expert, 0), BLOCK_E, mask=known)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_blocks"])
def _place_kernel(
    experts_ptr, counts_ptr, pairs_ptr, block_experts_ptr, ends_ptr, num_pairs, num_chunks,
    num_blocks, stride,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr, COMPARED: tl.constexpr, AT_ONCE: tl.constexpr, COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gives every pair of a chunk its place, and some blocks their experts. Without COUNTED there
    is one chunk, which is counted here."""
    start_next(PDL)
    await_previous(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    first = chunk * CHUNK
    pair = first + tl.arange(0, CHUNK)
    expert = _load_experts(experts_ptr, pair, num_pairs, stride, SLOTS)
    known = (expert >= 0) & (expert < EXPERTS)
    expert = tl.where(known, expert, 0)
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    if COUNTED:
        for start in range(0, num_chunks, AT_ONCE):
            other = start + tl.arange(0, AT_ONCE)[:, None]
            at = counts_ptr + other * BLOCK_E + bins[None, :]
            counts = tl.load(at, mask=other < num_chunks, other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where(other < chunk, counts, 0), 0)
    else:
        total += tl.histogram(expert, BLOCK_E, mask=known)
    blocks = (total + ROWS - 1) // ROWS
    end_block = tl.cumsum(blocks, 0)
    start = (end_block - blocks) * ROWS
    rank = tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, CHUNK, COMPARED):
        other = first + begin + tl.arange(0, COMPARED)
        others = _load_experts(experts_ptr, other, num_pairs, stride, SLOTS)
        before_it = (others[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
        rank += tl.sum(before_it.to(tl.int32), 1)
    place = tl.gather(start + before, expert, 0) + rank
    # Launches may be noted instead of made: then the counts are whatever was in memory.
    known = known & (place >= 0) & (place < num_blocks * ROWS)
    tl.store(pairs_ptr + place, pair, mask=known)
    if chunk == 0:
        tl.store(ends_ptr + bins, start + total, mask=bins < EXPERTS)
    for begin in range(chunk * AT_ONCE, num_blocks, num_chunks * AT_ONCE):
        block = begin + tl.arange(0, AT_ONCE)
        owner = tl.sum((end_block[None, :] <= block[:, None]).to(tl.int32), 1)
        owner = tl.where(owner < EXPERTS, owner, -1)
        tl.store(block_experts_ptr + block, owner, mask=block < num_blocks)


_count = Launcher(_count_kernel)
_place = Launcher(_place_kernel)


def sort_into_blocks(experts: Tensor, num_experts: int, rows: int) -> Blocks:
    """`experts [tokens, slots]` int32 in blocks of `rows`; pairs of no known expert are left out.

    One launch for up to 64 pairs, two for more.
    """
    tokens, slots = experts.shape
    num_pairs, device = tokens * slots, experts.device
    count = most_blocks(num_pairs, num_experts, rows)
    chunk = next((chunk for most, chunk in CHUNKS if num_pairs <= most), MOST)
    chunks, bins = cdiv(num_pairs, chunk), next_power_of_2(num_experts)
    pairs = torch.empty(count * rows, dtype=torch.int32, device=device)
    block_experts = torch.empty(count, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    counts = None
    pdl = dependent_launch(device)
    constants = {"SLOTS": slots, "EXPERTS": num_experts, "CHUNK": chunk, "BLOCK_E": bins, **pdl}
    if chunks > 1:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
        _count[(chunks,)](experts, counts, num_pairs, experts.stride(0), **constants)
    _place[(chunks,)](
        experts, counts, pairs, block_experts, ends, num_pairs, chunks, count, experts.stride(0),
        ROWS=rows, COMPARED=_COMPARED, AT_ONCE=_ROWS, COUNTED=counts is not None, num_warps=8,
        **constants,
    )  # fmt: skip
    return Blocks(rows, count, pairs, block_experts, ends)
