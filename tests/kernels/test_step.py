# SPDX-License-Identifier: Apache-2.0
"""`prepare` and `accept` against a plain loop over requests and tokens, on every implementation."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from vllm.kernels.step import (
    AcceptProblem,
    JournalCommits,
    PagedGroups,
    PagedSlots,
    PrepareProblem,
    Progress,
    cpu,
    triton,
)
from vllm.kernels.step.problem import NEVER_ENDS, ON_DEVICE


@pytest.fixture(params=[cpu, triton], ids=["cpu", "triton"])
def step(request, device):
    if request.param is cpu and torch.device(device).type != "cpu":
        pytest.skip("numpy reads host memory")
    return request.param


ROWS, PADDED_TOKENS, PADDED_REQUESTS, MAX_MODEL_LEN = 12, 96, 10, 42
BLOCK_SIZES = (4, 16)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Case:
    problem: PrepareProblem
    #: of every request: row, computed before, tokens that count, tokens, whether a decode
    requests: list[tuple[int, int, int, int, bool]]


def make_case(seed: int, width: int, journals: bool, device: torch.device) -> Case:
    """A step of decodes, some of them with fewer tokens than the step is wide or known to the host
    alone, and of prefills; what is to be filled holds garbage."""
    source = random.Random(seed)
    rows = source.sample(range(ROWS), 8)
    decodes, most = source.randint(0, 5), 4
    progress = Progress.create(ROWS, most, torch.device("cpu"))
    for row in range(ROWS):
        progress.computed[row] = source.randint(1, 40)
        progress.num_drafts[row] = source.randint(0, most - 1)
        progress.pending[row] = source.randint(0, 5)
        progress.first[row] = source.randint(0, 7)
        progress.taken[row] = source.randint(0, 3)
        progress.ended[row] = source.choice([0, 0, 1, NEVER_ENDS])
    progress.tokens.random_(100, 200)
    table, expected, first = [], [], 0
    for i, row in enumerate(rows):
        decode = i < decodes
        known = not decode or source.random() < 0.3
        computed = source.randint(0, 30) if known else int(progress.computed[row])
        count = source.randint(1, 12)
        if decode:
            count = 1 if known else source.randint(1, width)
        table.append([row, computed if known else ON_DEVICE, count, first])
        tokens = width if decode else count
        expected.append((row, computed, count, tokens, decode))
        first += tokens
    while len(table) < PADDED_REQUESTS:
        table.append([-1, 0, 0, 0])
    groups = [
        PagedSlots(
            torch.randint(0, 9, (PADDED_REQUESTS, 64), dtype=torch.int32).to(device)[:, :40],
            size,
            torch.full((PADDED_TOKENS,), 7, dtype=torch.int64, device=device),
        )
        for size in BLOCK_SIZES
    ]
    states = [torch.arange(i, i + PADDED_REQUESTS, dtype=torch.int32).to(device) for i in (20, 40)]
    steps = torch.full((PADDED_REQUESTS, 4), -7, dtype=torch.int32, device=device)
    problem = PrepareProblem(
        progress=on(progress, device),
        requests=int32(table).to(device),
        num_requests=len(rows),
        num_decodes=decodes,
        width=width,
        num_tokens=first,
        input_ids=torch.arange(PADDED_TOKENS, device=device),
        positions=torch.full((PADDED_TOKENS,), -5, dtype=torch.int64, device=device),
        next_positions=torch.full((PADDED_TOKENS,), -5, dtype=torch.int64, device=device),
        seq_lens=torch.full((PADDED_REQUESTS,), -5, dtype=torch.int32, device=device),
        max_model_len=MAX_MODEL_LEN,
        groups=PagedGroups.of(groups, device, states),
        journal=JournalCommits(steps, 9, 5, 3, seed) if journals else None,
    )
    return Case(problem, expected)


def on(progress: Progress, device: torch.device) -> Progress:
    return Progress(*(getattr(progress, f.name).clone().to(device) for f in fields(progress)))


def check(case: Case, before: Progress) -> None:
    problem = case.problem
    after = on(problem.progress, torch.device("cpu"))
    ids, positions, following = (
        t.tolist() for t in (problem.input_ids, problem.positions, problem.next_positions)
    )
    token = 0
    for i, (row, computed, count, tokens, decode) in enumerate(case.requests):
        on_device = int(problem.requests[i, 1]) == ON_DEVICE
        ended = decode and on_device and int(before.ended[row]) == 1
        kept = int(before.ended[row]) if on_device else min(int(before.ended[row]), 0)
        assert int(after.ended[row]) == kept
        for first, blocks in zip((20, 40), problem.groups.states, strict=True):
            assert int(blocks[i]) == (-1 if ended else first + i)
        for j in range(tokens):
            placed = computed + j < MAX_MODEL_LEN and not ended
            position = computed + j if placed else 0
            assert (positions[token], following[token]) == (position, position + 1)
            if on_device:
                assert ids[token] == int(before.tokens[row, j])
            else:
                assert ids[token] == (token if j < count else 0)
            for group in problem.groups.groups:
                block = int(group.block_table[i, position // group.block_size])
                slot = block * group.block_size + position % group.block_size
                assert int(group.slots[token]) == (slot if placed and block else -1)
            token += 1
        assert int(problem.seq_lens[i]) == computed + tokens
        if ended:
            for name in ("computed", "pending", "first", "taken"):
                assert getattr(after, name)[row] == getattr(before, name)[row]
            continue
        assert int(after.computed[row]) == computed + (1 if decode else count)
        if decode and problem.journal is not None:
            check_journal(problem.journal, problem.width, before, after, i, row, not on_device)
    assert not any(positions[token:]) and not any(ids[token:])
    assert all(set(g.slots[token:].tolist()) == {-1} for g in problem.groups.groups)
    assert not problem.seq_lens[len(case.requests) :].any()
    others = [r for r in range(ROWS) if r not in [one[0] for one in case.requests]]
    for name in ("computed", "pending", "first", "tokens", "num_drafts", "taken", "ended"):
        assert torch.equal(getattr(after, name)[others], getattr(before, name)[others])


def check_journal(
    journal: JournalCommits,
    width: int,
    before: Progress,
    after: Progress,
    i: int,
    row: int,
    given: bool,
) -> None:
    pending, first = int(before.pending[row]), int(before.first[row])
    if given:
        pending = first = 0
        assert int(after.taken[row]) == 0
    commits = (journal.turn + row) % journal.interval == 0
    commits = commits or pending + width > journal.most_pending
    assert journal.steps[i].tolist() == [row, pending, int(commits), first]
    assert int(after.pending[row]) == (0 if commits else pending + 1)
    moved = (first + pending) % journal.places if width > 1 else 0
    assert int(after.first[row]) == (moved if commits else first)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_prepare_fills_every_array(step, width, device):
    for seed in range(6):
        case = make_case(seed, width, seed % 2 == 0, device)
        before = on(case.problem.progress, torch.device("cpu"))
        step.prepare(case.problem)
        check(case, before)


def test_prepare_without_a_request_is_all_padding(step, device):
    case = make_case(0, 1, False, device)
    empty = replace(case.problem, num_requests=0, num_decodes=0, num_tokens=0)
    step.prepare(empty)
    check(Case(empty, []), on(empty.progress, torch.device("cpu")))


def test_accept_takes_nothing_that_ends_the_output(step, device):
    progress = Progress.create(ROWS, 4, device)
    progress.tokens[3] = torch.tensor([1, 5, 6, 7], device=device)
    progress.num_drafts[3] = 3
    progress.stops[3, :2] = torch.tensor([9, 6], device=device)
    counts = int32([[-1], [-1]]).to(device)
    sampled = torch.tensor([5, 6, 7, 8], device=device)
    step.accept(AcceptProblem(progress, int32([[3, 0, 4, 0]]).to(device), sampled, counts))
    assert counts.tolist() == [[2], [3]] and int(progress.tokens[3, 0]) == 6


def test_accept_takes_drafts_up_to_the_first_that_differs(step, device):
    width = 4
    #: drafts of the row, samples, samples that count -> accepted
    cases = [
        ([5, 6, 7], [5, 6, 7, 8], 4, 4),
        ([5, 6, 7], [5, 6, 1, 8], 4, 3),
        ([5, 6, 7], [1, 6, 7, 8], 4, 1),
        ([5, 6, 7], [5, 6, 7, 8], 2, 2),
        ([5], [5, 5, 5, 5], 4, 2),
        ([], [5, 5, 5, 5], 1, 1),
        ([5, 6, 7], [5, 1, 7, 8], 4, 2),
    ]
    progress = Progress.create(ROWS, width, device)
    progress.tokens.fill_(5)
    progress.computed.fill_(10)
    progress.pending.fill_(2)
    progress.taken.fill_(9)
    table, sampled = [], []
    for i, (drafts, samples, count, _) in enumerate(cases):
        row = ROWS - 1 - i
        progress.num_drafts[row] = len(drafts)
        for j, draft in enumerate(drafts):
            progress.tokens[row, 1 + j] = draft
        table.append([row, len(sampled), count, i % 2])
        sampled += samples[: max(count, 1)]
    counts = torch.full((2, len(cases)), -1, dtype=torch.int32, device=device)
    ids = torch.tensor(sampled, device=device)
    step.accept(AcceptProblem(progress, int32(table).to(device), ids, counts))
    assert counts[0].tolist() == [case[3] for case in cases]
    assert counts[1].tolist() == [min(len(drafts), count - 1) for drafts, _, count, _ in cases]
    for i, (_, samples, _, accepted) in enumerate(cases):
        row = ROWS - 1 - i
        assert int(progress.tokens[row, 0]) == samples[accepted - 1]
        assert int(progress.computed[row]) == 10 + accepted - 1
        journals = i % 2 == 1
        assert int(progress.pending[row]) == 2 + (accepted - 1 if journals else 0)
        assert int(progress.taken[row]) == (accepted - 1 if journals else 9)
    untouched = ROWS - len(cases)
    assert set(progress.computed[:untouched].tolist()) == {10}


@pytest.mark.parametrize("ends", [True, False])
def test_accept_notes_what_has_ended(step, device, ends):
    """Rows that end with an accepted draft, with the token after it, that go on, that have ended
    before, and that never end; a step launched since accepts nothing of those that have."""
    progress = Progress.create(ROWS, 3, device)
    progress.stops[:, 1] = 6
    progress.computed.fill_(10)
    progress.tokens[:] = torch.tensor([1, 5, 6], device=device)
    progress.num_drafts.fill_(2)
    progress.taken.fill_(2)
    progress.ended[:5] = int32([0, 0, 0, 1, NEVER_ENDS]).to(device)
    samples = [[5, 6, 7], [6, 5, 5], [5, 7, 7], [5, 6, 7], [5, 6, 7]]
    table = int32([[row, 3 * row, 3, 1] for row in range(5)]).to(device)
    counts = torch.zeros(2, 5, dtype=torch.int32, device=device)
    sampled = torch.tensor(samples, device=device).flatten()
    step.accept(AcceptProblem(progress, table, sampled, counts, ends))
    assert counts[0].tolist() == [2, 1, 2, 1, 2]
    assert progress.tokens[:5, 0].tolist() == [6, 6, 7, 5, 6]
    assert progress.ended[:5].tolist() == [int(ends), int(ends), 0, 1, NEVER_ENDS]
    assert progress.computed[:5].tolist() == [11, 10, 11, 10, 11]
    assert progress.taken[:5].tolist() == [1, 0, 1, 2, 1]
