# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Prompt lookup in three launches: take in the new tokens, search, propose.

The search reads a row's whole history, so several programs share it. Each keeps its best place as
one integer whose order is that of places (longer first, then earlier), and the row's best is their
maximum.
"""

import triton
import triton.language as tl

from vllm.kernels.ngram.problem import LookupProblem
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

#: places that a program compares at a time
_BLOCK = 1024
#: programs that a search has at least, if the longest history is long enough for them
_PROGRAMS = 512


@triton.jit(do_not_specialize=["size"])
def _append_kernel(
    history_ptr, lengths_ptr, requests_ptr, sampled_ptr, counts_ptr, best_ptr, size,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (requests)."""
    i = tl.program_id(0)
    row = tl.load(requests_ptr + i * 4)
    first = tl.load(requests_ptr + i * 4 + 1)
    length = tl.load(lengths_ptr + row)
    end = tl.minimum(length + tl.load(counts_ptr + i), size)
    j = tl.arange(0, WIDTH)
    new = length + j < end
    token = tl.load(sampled_ptr + first + j, mask=new, other=0).to(tl.int32)
    tl.store(history_ptr + row.to(tl.int64) * size + length + j, token, mask=new)
    tl.store(lengths_ptr + row, end)
    tl.store(best_ptr + row, 0)


@triton.jit(do_not_specialize=["size", "parts"])
def _search_kernel(
    history_ptr, lengths_ptr, requests_ptr, best_ptr, size, parts,
    LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (requests, parts). A place is the index of the token after a match."""
    row = tl.load(requests_ptr + tl.program_id(0) * 4)
    length = tl.load(lengths_ptr + row)
    tokens = history_ptr + row.to(tl.int64) * size
    best = tl.zeros((BLOCK,), tl.int64)
    for begin in range(1 + tl.program_id(1) * BLOCK, length, parts * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        alive = place < length
        matched = tl.zeros((BLOCK,), tl.int32)
        for n in tl.static_range(1, MOST + 1):
            ours = tl.load(tokens + length - n, mask=length > n, other=-1)
            theirs = tl.load(tokens + place - n, mask=alive & (place >= n), other=-2)
            alive = alive & (ours == theirs)
            matched += alive.to(tl.int32)
        key = (matched.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= LEAST, key, 0))
    found = tl.max(best, 0)
    if found > 0:
        tl.atomic_max(best_ptr + row, found)


@triton.jit(do_not_specialize=["size", "num_drafts"])
def _propose_kernel(
    history_ptr, lengths_ptr, requests_ptr, best_ptr, tokens_ptr, drafts_ptr, size, num_drafts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (requests)."""
    row = tl.load(requests_ptr + tl.program_id(0) * 4)
    length = tl.load(lengths_ptr + row)
    best = tl.load(best_ptr + row)
    place = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    count = tl.where(best > 0, tl.minimum(num_drafts, length - place), 0)
    j = tl.arange(0, BLOCK)
    draft = tl.load(history_ptr + row.to(tl.int64) * size + place + j, mask=j < count, other=0)
    tl.store(tokens_ptr + row * WIDTH + 1 + j, draft.to(tl.int64), mask=j < count)
    tl.store(drafts_ptr + row, count)


_append, _search, _propose = (
    Launcher(kernel) for kernel in (_append_kernel, _search_kernel, _propose_kernel)
)


def look_up(problem: LookupProblem) -> None:
    """See `LookupProblem`."""
    history, width = problem.history, problem.tokens.shape[1]
    k, size = len(problem.requests), history.shape[1]
    rows = (history, problem.lengths, problem.requests)
    block = next_power_of_2(width)
    _append[(k,)](*rows, problem.sampled, problem.counts, problem.best, size, WIDTH=block)
    if problem.num_drafts:
        parts = max(1, min(cdiv(_PROGRAMS, k), cdiv(size, _BLOCK)))
        _search[(k, parts)](
            *rows, problem.best, size, parts, LEAST=problem.least, MOST=problem.most, BLOCK=_BLOCK
        )
    _propose[(k,)](
        *rows, problem.best, problem.tokens, problem.drafts, size, problem.num_drafts, WIDTH=width,
        BLOCK=block,
    )  # fmt: skip
