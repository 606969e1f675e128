# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup against the reference, on every implementation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vllm.kernels.ngram import LookupProblem, cpu, naive, triton

ROWS, SIZE, WIDTH = 6, 80, 5


@pytest.fixture(params=[cpu, triton], ids=["cpu", "triton"])
def look_up(request, device):
    if request.param is cpu and torch.device(device).type != "cpu":
        pytest.skip("numpy reads host memory")
    return request.param.look_up


def problem(seed: int, device: str, **changes: int) -> LookupProblem:
    """Rows of few different tokens, so that much repeats; one is about to be full."""
    source = random.Random(seed)
    rows = source.sample(range(ROWS), 4)
    counts = [source.randint(1, WIDTH) for _ in rows]
    lengths = torch.tensor([source.randint(0, SIZE - WIDTH) for _ in range(ROWS)])
    lengths[rows[0]] = SIZE - 1
    alphabet = source.choice([2, 3, 40])
    history = torch.tensor([[source.randrange(alphabet) for _ in range(SIZE)] for _ in range(ROWS)])
    requests = [[row, i * WIDTH, WIDTH, 0] for i, row in enumerate(rows)]
    sampled = [source.randrange(alphabet) for _ in range(WIDTH * len(rows))]

    def int32(values: Tensor | list) -> Tensor:
        return torch.as_tensor(values).to(device, torch.int32)

    found = LookupProblem(
        history=int32(history),
        lengths=int32(lengths),
        requests=int32(requests),
        sampled=torch.tensor(sampled, device=device),
        counts=int32(counts),
        tokens=torch.full((ROWS, WIDTH), 7, device=device),
        drafts=int32([9] * ROWS),
        best=torch.full((ROWS,), 5, device=device),
        least=source.randint(1, 3),
        most=source.randint(3, 6),
        num_drafts=source.randint(1, WIDTH - 1),
    )
    return replace(found, **changes)


def copied(problem: LookupProblem) -> LookupProblem:
    tensors = {n: t.clone() for n, t in vars(problem).items() if isinstance(t, Tensor)}
    return replace(problem, **tensors)


@pytest.mark.parametrize("seed", range(16))
def test_equals_the_reference(seed: int, look_up, device: str) -> None:
    given = problem(seed, device)
    expected = copied(given)
    naive.look_up(expected)
    look_up(given)
    for name in ("history", "lengths", "drafts", "tokens"):
        assert torch.equal(getattr(given, name), getattr(expected, name)), name


def test_the_reference_proposes_something() -> None:
    """Else the comparison above compares nothing."""
    counts = []
    for seed in range(40):
        given = problem(seed, "cpu")
        naive.look_up(given)
        counts += given.drafts[given.requests[:, 0]].tolist()
    assert {0, 1, 2, 3, 4} <= set(counts)


def test_no_drafts_asked_for(look_up, device: str) -> None:
    """The history is kept up to date, so that drafting can begin again."""
    given = problem(3, device, num_drafts=0)
    expected = copied(given)
    naive.look_up(expected)
    look_up(given)
    assert torch.equal(given.history, expected.history)
    assert not given.drafts[given.requests[:, 0].long()].any()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([5, 1, 2, 9, 6, 1, 2, 8, 6, 1, 2], [8, 6, 1]),  # the longer match, though later
        ([1, 2, 7, 1, 2, 8, 1, 2], [7, 1, 2]),  # of two the first
        ([4, 4, 4, 4], [4]),  # a match may overlap the suffix
        ([1, 2, 3, 4], []),
        ([3], []),
        ([], []),
    ],
)
def test_continuation(tokens: list[int], expected: list[int]) -> None:
    assert naive.continuation(tokens, 1, 3, 3) == expected


def test_a_long_history(look_up, device: str) -> None:
    """More places than one program compares at a time."""
    size = 5000
    tokens = torch.randint(1000, 60000, (size,), generator=torch.Generator().manual_seed(1))
    tokens[4321:4324], tokens[-3:] = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3])
    history = torch.zeros(2, size + 8, dtype=torch.int32, device=device)
    history[1, :size] = tokens.to(device, torch.int32)
    given = problem(0, device, least=2, most=4, num_drafts=4)
    int32 = {"dtype": torch.int32, "device": device}
    given = replace(
        given,
        history=history,
        lengths=torch.tensor([0, size - 1], **int32),
        requests=torch.tensor([[1, 2, 1, 0]], **int32),
        sampled=torch.tensor([0, 0, 3], device=device),
        counts=torch.tensor([1], **int32),
    )
    look_up(given)
    assert given.drafts[1] == 4 and given.lengths[1] == size
    assert given.tokens[1, 1:].tolist() == tokens[4324:4328].tolist()
