# SPDX-License-Identifier: Apache-2.0
"""All experts of a layer in one call on the CPU: against fp64, against the experts one by one, and
rows against rows alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.kernels.cases import TOLERANCE, error_ratio, randn, strided
from tests.kernels.test_fp8_experts import problem_of as float8_problem
from tests.kernels.test_moe import wide
from vllm import decisions
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.moe import ClampedSwiglu, ExpertsProblem, Routing, cpu, naive, one_by_one

KERNELS = CpuKernels()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLAMP = ClampedSwiglu(1.702, 1.5, 1.0)
#: fields of a problem; "biased" and "shared" are made with it
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "clamped with biases": {"clamp": CLAMP, "biased": True},
    "squared relu": {"gated": False},
    "squared relu with biases and shared": {"gated": False, "biased": True, "shared": True},
    "shared": {"shared": True},
}
#: hidden and intermediate size: whole steps and blocks of columns, and neither
SIZES = ((64, 48), (100, 41))
#: how often an expert is hit, in proportion: by more than one block of pairs, or by none
COUNTS = (131, 12, 7, 1, 0)


def made(
    tokens: int,
    dtype: torch.dtype,
    sizes: tuple[int, int] = SIZES[1],
    *,
    slots: int = 2,
    gated: bool = True,
    biased: bool = False,
    shared: bool = False,
    **fields: Any,
) -> ExpertsProblem:
    hidden, inner = sizes
    count, rows = len(COUNTS), (1 + gated) * inner
    random = partial(randn, dtype=dtype, device="cpu")
    weights = torch.rand(tokens, slots + shared)
    # The slot of a shared expert has a number that nobody reads.
    experts = torch.full((tokens, slots + shared), 2**31 - 1, dtype=torch.int32)
    owners = torch.arange(count).repeat_interleave(torch.tensor(COUNTS))
    experts[:, :slots] = owners[torch.randint(0, len(owners), (tokens, slots))]
    if biased:
        fields |= {"gate_up_bias": random(count, rows), "down_bias": random(count, hidden)}
    return ExpertsProblem(
        strided(random(tokens, hidden)),
        random(count, rows, hidden, scale=hidden**-0.5),
        random(count, hidden, inner, scale=inner**-0.5),
        Routing(weights, experts),
        strided(random(tokens, hidden)) if shared else None,
        gated,
        **fields,
    )


def rows_of(problem: ExpertsProblem, rows: Any) -> ExpertsProblem:
    routing = Routing(problem.routing.weights[rows], problem.routing.experts[rows])
    shared = None if problem.shared is None else problem.shared[rows]
    return replace(problem, x=problem.x[rows], routing=routing, shared=shared)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_agree_with_fp64(
    dtype: torch.dtype, tokens: int, sizes: tuple[int, int], kind: str
) -> None:
    problem = made(tokens, dtype, sizes, **KINDS[kind])
    found, expected = KERNELS.run_experts(problem), naive.run_experts(wide(problem))
    assert found.shape == expected.shape and found.dtype == dtype
    if tokens:
        # Products and activations are rounded on the way.
        assert error_ratio(found, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_experts_one_by_one(dtype: torch.dtype, kind: str) -> None:
    # Of 16-bit tokens torch multiplies more than 16, in another order.
    problem = made(150 if dtype == torch.float32 else 8, dtype, **KINDS[kind])
    assert torch.equal(KERNELS.run_experts(problem), one_by_one.run_experts(problem))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, kind: str) -> None:
    problem = made(150, dtype, **KINDS[kind])
    whole = KERNELS.run_experts(problem)
    for size in (1, 2, 3, 4, 5, 6, 13, 70):
        for start in range(0, 150 - size, 40):
            rows = slice(start, start + size)
            assert torch.equal(KERNELS.run_experts(rows_of(problem, rows)), whole[rows])
    order = torch.randperm(150)
    assert torch.equal(KERNELS.run_experts(rows_of(problem, order)), whole[order])


def test_no_number_of_threads_changes_bits() -> None:
    problem = made(150, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(KERNELS.run_experts(problem))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_no_number_stays_in_its_row() -> None:
    problem = made(30, torch.float32)
    problem.routing.experts.fill_(1)
    problem.x[4, 7] = torch.nan
    found = KERNELS.run_experts(problem)
    assert found[4].isnan().all() and not found[:4].isnan().any() and not found[5:].isnan().any()


@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_other_ranks_are_neither_read_nor_added(shared: bool) -> None:
    problem = made(3, torch.float32, shared=shared)
    experts, weights = problem.routing.experts, problem.routing.weights
    experts[0, :2] = torch.tensor([-7, 2**31 - 1], dtype=torch.int32)
    weights[0, :2] = torch.nan
    experts[1, :2] = torch.tensor([len(COUNTS), 1], dtype=torch.int32)
    found = KERNELS.run_experts(problem)
    expected = torch.zeros_like(found[0])
    if problem.shared is not None:
        expected = weights[0, 2] * problem.shared[0]
    assert torch.equal(found[0], expected)
    # As if the second token had one expert.
    experts[1, 0], weights[1, 0] = 1, 0.0
    assert error_ratio(found[1:], naive.run_experts(wide(rows_of(problem, slice(1, 3))))) < 5e-6


def test_wrong_arguments_are_named() -> None:
    problem = made(2, torch.float32, biased=True)
    routing, gate_up, down = problem.routing, problem.gate_up, problem.down
    bias, short = problem.gate_up_bias, Routing(routing.weights[:, :1], routing.experts)
    assert bias is not None
    for message, fields in {
        "x must be float32, bfloat16 or float16": {"x": problem.x.double()},
        r"gate_up must have shape \[5, 82, 100\]": {"gate_up": gate_up[:, 1:]},
        r"down must have shape \[any, 100, any\]": {"down": down[:, 1:]},
        "down must be dense": {"down": down.mT.contiguous().mT},
        "down must have the activations' dtype": {"down": down.half()},
        r"gate_up_bias must have shape \[5, 82\]": {"gate_up_bias": bias[:, 1:]},
        r"weights must have shape \[2, 2\]": {"routing": short},
        "weights must be float32": {"routing": Routing(routing.weights.half(), routing.experts)},
        "experts must be int32": {"routing": Routing(routing.weights, routing.experts.long())},
        r"shared must have shape \[2, 100\]": {
            "routing": Routing(torch.rand(2, 2), routing.experts),
            "shared": problem.x[:, 1:],
        },
        "alpha, limit and offset must be given all or none": {
            "gated": False,
            "gate_up": gate_up[:, :41].contiguous(),
            "gate_up_bias": None,
            "clamp": CLAMP,
        },
    }.items():
        with pytest.raises(RuntimeError, match=f"run_experts: {message}"):
            KERNELS.run_experts(replace(problem, **fields))  # type: ignore[arg-type]


# ---- which problems it takes ---------------------------------------------------------------------


def reason(problem: ExpertsProblem) -> str | None:
    """Why the experts were run one by one; None: they were not."""
    decisions.clear()
    KERNELS.run_experts(problem)
    found = {d.what: d.why for d in decisions.decisions()}
    return found.get("mixtures of experts on the CPU")


def test_float8_experts_are_run_one_by_one() -> None:
    for form in ("rows", "groups"):
        assert reason(float8_problem(3, form, "cpu")) == one_by_one.FLOAT8
    for dtype in DTYPES:
        assert reason(made(3, dtype)) is None


def test_many_tokens_in_bfloat16_are_left_to_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    most = cpu.MOST_PAIRS_WITHOUT_UNITS * len(COUNTS) // 2
    many = made(most + 1, torch.bfloat16)
    for units in (False, True):
        monkeypatch.setattr(cpu, "has_matrix_units", lambda units=units: units)
        assert reason(many) == (one_by_one.MATRIX_UNITS if units else None)
    assert reason(rows_of(many, slice(1, None))) is None
    assert reason(replace(many, ranks=2)) is None
    assert reason(made(most + 1, torch.float32)) is None
