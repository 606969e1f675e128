# SPDX-License-Identifier: Apache-2.0
"""How ops find their implementations, and that all of these are called alike."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.registry import ComposedOp, Implementation, Op, Registry

OPS = {op.name: op for op in Kernels.ops()}
CASES = [
    pytest.param(op, implementation, id=f"{op.name}-{platform}{i}")
    for op in OPS.values()
    for platform in ("cpu", "cuda")
    for i, implementation in enumerate(op.implementations(platform))
]


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; of a compiled op, whose defaults layers do not rely on, names."""
    if isinstance(function, torch._ops.OpOverload):
        return [argument.name for argument in function._schema.arguments]
    listed = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in listed if p.name != "self"]


@pytest.mark.parametrize(("op", "implementation"), CASES)
def test_implementations_take_the_arguments_of_the_reference(
    op: Op[Any, Any], implementation: Implementation[Any, Any]
) -> None:
    contract = op.composition if isinstance(op, ComposedOp) else op.reference
    assert contract.__name__ == op.name and contract.__doc__
    expected = parameters(contract)
    if isinstance(implementation.run, torch._ops.OpOverload):
        expected = [name for name, _, _ in expected]
    assert parameters(implementation.run) == expected
    if implementation.takes is not None:
        assert parameters(implementation.takes) == parameters(contract)


@pytest.mark.parametrize("make", [NaiveKernels, CpuKernels, CudaKernels])
def test_every_op_ends_in_what_takes_everything(make: type[Kernels]) -> None:
    """Compiled ops for some arguments stand before one for all, a composition, or the reference."""
    for op in OPS.values():
        total = any(i.takes is None for i in op.implementations(make.platform))
        assert total or isinstance(op, ComposedOp) or make is NaiveKernels, op.name
        assert callable(getattr(make(), op.name))


def test_the_reference_loads_without_triton_kernels() -> None:
    program = (
        "import sys, vllm.kernels.naive\n"
        "vllm.kernels.naive.NaiveKernels()\n"
        "assert not [m for m in sys.modules if m.startswith(('vllm.kernels.triton', 'triton.'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def half(x: Tensor) -> Tensor:
    """What `Small.half` computes."""
    return x / 2


class Small(Registry):
    """One op, implemented by what a test lists."""

    platform = "cuda"
    half = Op(half)


def listing(monkeypatch: pytest.MonkeyPatch, *implementations: Implementation[Any, Any]) -> None:
    monkeypatch.setattr(Op, "implementations", lambda op, platform: list(implementations))


COMPILED = CudaOps(what="halves", why="quicker", instead_of="Triton")


@pytest.mark.parametrize(("capability", "runs"), [(None, False), ((9, 0), True), ((8, 0), False)])
def test_the_first_that_takes_the_arguments_computes_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, runs: bool
) -> None:
    asked: list[tuple[int, int]] = []

    def choose(ops: CudaOps, capability: tuple[int, int]) -> bool:
        asked.append(capability)
        return capability == (9, 0)

    monkeypatch.setattr(CudaOps, "choose", choose)
    small = Implementation(lambda x: "few", lambda x: x < 3, COMPILED)
    middle = Implementation(lambda x: "some", lambda x: x < 5, COMPILED)
    listing(monkeypatch, small, middle, Implementation(lambda x: "any"))
    kernels = Small(capability)
    found = [kernels.half(x) for x in (2, 4, 6)]  # type: ignore[arg-type]
    assert found == (["few", "some", "any"] if runs else ["any"] * 3)
    assert asked == ([] if capability is None else [capability])


def test_what_nothing_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, Implementation(lambda x: x, lambda x: False))
    with pytest.raises(ValueError, match="no kernel of platform 'cuda' takes this half"):
        Small().half(torch.ones(1))
    listing(monkeypatch)
    with pytest.raises(ValueError, match="no kernel"):
        Small().half(torch.ones(1))


def test_compositions_use_the_ops_of_a_subclass() -> None:
    class Doubling(NaiveKernels):
        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return 2 * super().linear(x, weight, bias)

    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    plain, doubled = NaiveKernels(), Doubling()
    assert torch.equal(doubled.linear(x, weight, None), 2 * plain.linear(x, weight, None))
    expected = plain.silu_and_mul(2 * plain.linear(x, weight, None))
    assert torch.equal(doubled.linear_silu_and_mul(x, weight, None), expected)


@pytest.mark.parametrize(("module", "why"), [("fast", "does not exist"), ("naive", "has no half")])
def test_a_module_that_implements_nothing_is_named(module: str, why: str) -> None:
    op = Op(half, cuda=(module,))
    op.name, op.package = "half", "vllm.kernels.norm"
    named = f"op 'half' names vllm.kernels.norm.{module} for cuda, which {why}: write it, or"
    with pytest.raises(ImportError, match=re.escape(named)):
        op.implementations("cuda")
