# SPDX-License-Identifier: Apache-2.0
"""`prepare` and `accept` in numpy: the reference, and what a CPU runs."""

import numpy as np

from vllm.kernels.step.problem import (
    ACCEPT_COUNT,
    ACCEPT_FIRST,
    ACCEPT_JOURNALS,
    ACCEPT_ROW,
    COUNT,
    FIRST_TOKEN,
    ON_DEVICE,
    ROW,
    START,
    AcceptProblem,
    JournalCommits,
    PrepareProblem,
    Progress,
)


def prepare(problem: PrepareProblem) -> None:
    """See `PrepareProblem`; every tensor is in host memory."""
    progress, width = problem.progress, problem.width
    n, decodes, total = problem.num_requests, problem.num_decodes, problem.num_tokens
    table = problem.requests[:n].numpy()
    rows, counts = table[:, ROW], table[:, COUNT]
    computed = progress.computed.numpy()
    on_device = table[:, START] == ON_DEVICE
    starts = np.where(on_device, computed[rows], table[:, START])
    given = rows[~on_device]
    progress.ended.numpy()[given] = np.minimum(progress.ended.numpy()[given], 0)
    ended = (np.arange(n) < decodes) & (progress.ended.numpy()[rows] > 0)

    lengths = table[:, COUNT].copy()
    lengths[:decodes] = width
    request = np.repeat(np.arange(n), lengths)
    index = np.arange(total) - table[request, FIRST_TOKEN]
    positions = problem.positions.numpy()
    placed = (starts[request] + index < problem.max_model_len) & ~ended[request]
    positions[:total] = np.where(placed, starts[request] + index, 0)
    positions[total:] = 0
    problem.next_positions.numpy()[:] = positions + 1
    ids = problem.input_ids.numpy()
    read = on_device[request]
    ids[:total][read] = progress.tokens.numpy()[rows[request[read]], index[read]]
    ids[:total][~read & (index >= counts[request])] = 0
    ids[total:] = 0
    seq_lens = problem.seq_lens.numpy()
    seq_lens[:n] = starts + lengths
    seq_lens[n:] = 0
    for group in problem.groups.groups:
        block, offset = np.divmod(positions[:total], group.block_size)
        blocks = group.block_table.numpy()[request, block].astype(np.int64)
        held = placed & (blocks != 0)
        group.slots.numpy()[:total] = np.where(held, blocks * group.block_size + offset, -1)
        group.slots.numpy()[total:] = -1

    for blocks in problem.groups.states:
        blocks.numpy()[:n][ended] = -1

    verified = np.where(np.arange(n) < decodes, 1, counts)
    computed[rows] = starts + np.where(ended, 0, verified)
    if problem.journal is not None:
        for count in (progress.pending, progress.first, progress.taken):
            count.numpy()[given] = 0
        _prepare_journal(progress, problem.journal, rows[:decodes], width, ended[:decodes])


def _prepare_journal(
    progress: Progress, journal: JournalCommits, rows: np.ndarray, width: int, ended: np.ndarray
) -> None:
    pending, first = progress.pending.numpy(), progress.first.numpy()
    waiting, place = pending[rows], first[rows]
    commits = (journal.turn + rows) % journal.interval == 0
    commits |= waiting + width > journal.most_pending
    steps = journal.steps[: len(rows)].numpy()
    steps[:] = np.stack([rows, waiting, commits, place], axis=1)
    # Drafts follow what is pending, which the kernels still read; without them none does.
    moved = (place + waiting) % journal.places if width > 1 else np.zeros_like(place)
    first[rows] = np.where(commits & ~ended, moved, place)
    pending[rows] = np.where(ended, waiting, np.where(commits, 0, waiting + 1))


def accept(problem: AcceptProblem) -> None:
    """See `AcceptProblem`; every tensor is in host memory."""
    progress, table = problem.progress, problem.requests.numpy()
    tokens, sampled = progress.tokens.numpy(), problem.sampled.numpy()
    rows, first = table[:, ACCEPT_ROW], table[:, ACCEPT_FIRST]
    ended = progress.ended.numpy()
    most = np.minimum(table[:, ACCEPT_COUNT], 1 + progress.num_drafts.numpy()[rows])
    gone = ended[rows] > 0
    most = np.where(gone, 1, most)
    stops = progress.stops.numpy()[rows]
    accepted = np.ones(len(rows), dtype=np.int32)
    follows = np.ones(len(rows), dtype=bool)
    for j in range(1, progress.width):
        follows &= j < most
        follows &= sampled[np.where(follows, first + j - 1, 0)] == tokens[rows, j]
        follows &= (stops != tokens[rows, j, None]).all(axis=1)
        accepted += follows
    problem.counts.numpy()[0] = accepted
    problem.counts.numpy()[1] = most - 1
    # A request without a token to sample is at its end: what its next step computes nobody reads.
    newest = np.maximum(sampled[first + accepted - 1], 0)
    tokens[rows, 0] = newest
    if problem.ends:
        ends = (stops == newest[:, None]).any(axis=1)
        ended[rows] = np.where(ended[rows] == 0, ends, ended[rows])
    if progress.width > 1:
        progress.computed.numpy()[rows] += accepted - 1
        journals = (table[:, ACCEPT_JOURNALS] != 0) & ~gone
        progress.pending.numpy()[rows[journals]] += accepted[journals] - 1
        progress.taken.numpy()[rows[journals]] = accepted[journals] - 1
