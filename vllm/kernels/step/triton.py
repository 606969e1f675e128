# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""`prepare` and `accept` in one launch each: a program per request reads the row's progress before
it writes it."""

import triton
import triton.language as tl

from vllm.kernels.step.problem import STOPS, AcceptProblem, PrepareProblem
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import next_power_of_2

#: tokens of a prefill that a program handles at a time
_BLOCK = 1024
_VARYING = [
    "num_requests",
    "num_decodes",
    "num_tokens",
    "num_padded",
    "num_groups",
    "num_states",
    "max_model_len",
]
_VARYING += ["interval", "turn"]


@triton.jit
def _fill_tokens(
    token, valid, placed, start, index, known, ids_ptr, positions_ptr, next_ptr,
    groups_ptr, num_groups, request, unknown,
):  # fmt: skip
    """Tokens `token` of a request, of which `placed` are not past its end; `known`: the ids of
    those that are `unknown` to the host."""
    position = tl.where(placed, start + index, 0).to(tl.int64)
    tl.store(positions_ptr + token, position, mask=valid)
    tl.store(next_ptr + token, position + 1, mask=valid)
    tl.store(ids_ptr + token, known, mask=valid & unknown)
    for g in range(num_groups):
        table = tl.load(groups_ptr + g * 4).to(tl.pointer_type(tl.int32))
        slots = tl.load(groups_ptr + g * 4 + 1).to(tl.pointer_type(tl.int64))
        stride = tl.load(groups_ptr + g * 4 + 2)
        size = tl.load(groups_ptr + g * 4 + 3)
        block = tl.load(table + request * stride + position // size, mask=placed & valid, other=0)
        slot = block.to(tl.int64) * size + position % size
        tl.store(slots + token, tl.where(block != 0, slot, -1), mask=valid)


@triton.jit(do_not_specialize=_VARYING)
def _prepare_kernel(
    requests_ptr,
    computed_ptr,
    tokens_ptr,
    pending_ptr,
    first_ptr,
    taken_ptr,
    ended_ptr,
    ids_ptr,
    positions_ptr,
    next_ptr,
    seq_lens_ptr,
    groups_ptr,
    states_ptr,
    steps_ptr,
    num_requests,
    num_decodes,
    num_tokens,
    num_padded,
    num_groups,
    num_states,
    max_model_len,
    interval,
    turn,
    WIDTH: tl.constexpr,
    MOST_WIDTH: tl.constexpr,
    JOURNAL: tl.constexpr,
    PLACES: tl.constexpr,
    MOST_PENDING: tl.constexpr,
    BQ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (padded requests + 1); the last program fills what pads the tokens."""
    i = tl.program_id(0)
    if i == tl.num_programs(0) - 1:
        for begin in range(num_tokens, num_padded, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            nothing = tl.zeros((BLOCK,), tl.int64)
            _fill_tokens(
                token, token < num_padded, token < 0, 0, nothing, nothing, ids_ptr, positions_ptr,
                next_ptr, groups_ptr, num_groups, 0, token >= 0,
            )  # fmt: skip
        return
    if i >= num_requests:
        tl.store(seq_lens_ptr + i, 0)
        return
    row = tl.load(requests_ptr + i * 4)
    given = tl.load(requests_ptr + i * 4 + 1)
    count = tl.load(requests_ptr + i * 4 + 2)
    first_token = tl.load(requests_ptr + i * 4 + 3)
    on_device = given < 0
    start = tl.where(on_device, tl.load(computed_ptr + row), given)
    mark = tl.load(ended_ptr + row)
    if given >= 0:
        mark = tl.minimum(mark, 0)
        tl.store(ended_ptr + row, mark)
    if i < num_decodes:
        index = tl.arange(0, BQ)
        valid = index < WIDTH
        read = valid & on_device
        ended = mark > 0
        known = tl.load(tokens_ptr + row * MOST_WIDTH + index, mask=read, other=0)
        placed = (start + index < max_model_len) & (mark <= 0)
        _fill_tokens(
            first_token + index, valid, placed, start, index, known, ids_ptr,
            positions_ptr, next_ptr, groups_ptr, num_groups, i, on_device | (index >= count),
        )  # fmt: skip
        tl.store(seq_lens_ptr + i, start + WIDTH)
        tl.store(computed_ptr + row, tl.where(ended, start, start + 1))
        for s in range(num_states):
            blocks = tl.load(states_ptr + s).to(tl.pointer_type(tl.int32))
            tl.store(blocks + i, -1, mask=ended)
        if JOURNAL:
            pending = tl.where(on_device, tl.load(pending_ptr + row), 0)
            place = tl.where(on_device, tl.load(first_ptr + row), 0)
            commits = ((turn + row) % interval == 0) | (pending + WIDTH > MOST_PENDING)
            tl.store(steps_ptr + i * 4, row)
            tl.store(steps_ptr + i * 4 + 1, pending)
            tl.store(steps_ptr + i * 4 + 2, commits.to(tl.int32))
            tl.store(steps_ptr + i * 4 + 3, place)
            moved = 0
            if WIDTH > 1:
                moved = (place + pending) % PLACES
            waiting = tl.where(commits, 0, pending + 1)
            tl.store(first_ptr + row, tl.where(commits & (mark <= 0), moved, place))
            tl.store(pending_ptr + row, tl.where(ended, pending, waiting))
            if given >= 0:
                tl.store(taken_ptr + row, 0)
    else:
        for begin in range(0, count, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            valid = index < count
            known = tl.zeros((BLOCK,), tl.int64)
            _fill_tokens(
                first_token + index, valid, valid, start, index, known, ids_ptr, positions_ptr,
                next_ptr, groups_ptr, num_groups, i, index < 0,
            )  # fmt: skip
        tl.store(seq_lens_ptr + i, start + count)
        tl.store(computed_ptr + row, start + count)
        if JOURNAL:
            tl.store(pending_ptr + row, 0)
            tl.store(first_ptr + row, 0)
            tl.store(taken_ptr + row, 0)


_prepare = Launcher(_prepare_kernel)


def prepare(problem: PrepareProblem) -> None:
    """See `PrepareProblem`."""
    progress, journal = problem.progress, problem.journal
    _prepare[(len(problem.seq_lens) + 1,)](
        problem.requests,
        progress.computed,
        progress.tokens,
        progress.pending,
        progress.first,
        progress.taken,
        progress.ended,
        problem.input_ids,
        problem.positions,
        problem.next_positions,
        problem.seq_lens,
        problem.groups.descriptors,
        problem.groups.state_addresses,
        None if journal is None else journal.steps,
        problem.num_requests,
        problem.num_decodes,
        problem.num_tokens,
        len(problem.input_ids),
        len(problem.groups.groups),
        len(problem.groups.states),
        problem.max_model_len,
        1 if journal is None else journal.interval,
        0 if journal is None else journal.turn,
        WIDTH=problem.width,
        MOST_WIDTH=progress.width,
        JOURNAL=journal is not None,
        PLACES=1 if journal is None else journal.places,
        MOST_PENDING=1 if journal is None else journal.most_pending,
        BQ=next_power_of_2(problem.width),
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["stride_counts"])
def _accept_kernel(
    requests_ptr,
    sampled_ptr,
    counts_ptr,
    stride_counts,
    computed_ptr,
    tokens_ptr,
    drafts_ptr,
    pending_ptr,
    taken_ptr,
    stops_ptr,
    ended_ptr,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Grid (requests)."""
    i = tl.program_id(0)
    row = tl.load(requests_ptr + i * 4)
    first = tl.load(requests_ptr + i * 4 + 1)
    most = tl.load(requests_ptr + i * 4 + 2)
    most = tl.minimum(most, 1 + tl.load(drafts_ptr + row))
    mark = tl.load(ended_ptr + row)
    most = tl.where(mark > 0, 1, most)
    stops = tl.load(stops_ptr + row * STOPS + tl.arange(0, STOPS))
    extra = 0
    follows = True
    for j in tl.static_range(1, WIDTH):
        sample = tl.load(sampled_ptr + first + j - 1, mask=j < most, other=-1)
        follows = follows & (j < most) & (sample == tl.load(tokens_ptr + row * WIDTH + j))
        follows = follows & (tl.sum((stops == sample).to(tl.int32), 0) == 0)
        extra += follows.to(tl.int32)
    tl.store(counts_ptr + i, 1 + extra)
    tl.store(counts_ptr + stride_counts + i, most - 1)
    # A request without a token to sample is at its end: what its next step computes nobody reads.
    newest = tl.load(sampled_ptr + first + extra)
    newest = tl.where(newest < 0, 0, newest)
    tl.store(tokens_ptr + row * WIDTH, newest)
    if ENDS:
        ends = tl.sum((stops == newest).to(tl.int32), 0) > 0
        tl.store(ended_ptr + row, 1, mask=(mark == 0) & ends)
    if WIDTH > 1:
        tl.store(computed_ptr + row, tl.load(computed_ptr + row) + extra)
        if tl.load(requests_ptr + i * 4 + 3) != 0:
            tl.store(pending_ptr + row, tl.load(pending_ptr + row) + extra)
            tl.store(taken_ptr + row, extra, mask=mark <= 0)


_accept = Launcher(_accept_kernel)


def accept(problem: AcceptProblem) -> None:
    """See `AcceptProblem`."""
    progress = problem.progress
    _accept[(len(problem.requests),)](
        problem.requests,
        problem.sampled,
        problem.counts,
        problem.counts.stride(0),
        progress.computed,
        progress.tokens,
        progress.num_drafts,
        progress.pending,
        progress.taken,
        progress.stops,
        progress.ended,
        WIDTH=progress.width,
        STOPS=STOPS,
        ENDS=problem.ends,
    )
