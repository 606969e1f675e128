# SPDX-License-Identifier: Apache-2.0
"""The short way to a compiled kernel finds the one that Triton finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.test_compile_ahead import run_compiled
from vllm.kernels.triton.launcher import Launcher


def test_it_launches_what_triton_launches(tmp_path: Path) -> None:
    """By types, alignment, values and constants, the second time as the first."""
    found = run_compiled("launcher_script.py", cache=tmp_path)
    assert found["different"] == []
    assert found["variants"] >= 15
    assert found["kernels of the other device"] == 1
    assert found["streams"] == [41] * 5
    assert [name.rpartition(".")[2] for name in found["waiting"]] == ["plain"] * 2
    assert found["asked"] == ["plain"] * 2, "noted once, and Triton is asked once for each"
    assert [name.rpartition(".")[2] for name in found["waiting again"]] == ["plain"]
    assert found["errors"] == ["constant_first: constants must be its last parameters"]


@triton.jit
def _double_kernel(x_ptr, rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 2 * tl.load(x_ptr + i, mask=i < rows), mask=i < rows)


_double = Launcher(_double_kernel)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_it_runs_interpreted_or_compiled(rows: int, device: str) -> None:
    x = torch.ones(100, device=device)
    for _ in range(3):
        _double[(4,)](x, rows, BLOCK=16)
    assert torch.equal(x.cpu(), torch.tensor([8.0] * rows + [1.0] * (100 - rows)))
