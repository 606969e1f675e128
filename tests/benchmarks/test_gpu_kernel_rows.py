# SPDX-License-Identifier: Apache-2.0
"""Rows of `benchmarks/gpu_kernels.py`: they name ops, have an amount, and build their problems."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.cases import PROBLEMS
from vllm.kernels.latent_attention import LatentAttentionProblem
from vllm.kernels.latent_attention.expanded import takes_expanded

MODULE = "benchmarks.gpu_kernels"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as on a GPU, whose tensors are on the CPU."""
    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    module: Any = importlib.import_module(MODULE)
    module.DEVICE = "cpu"
    yield module
    del sys.modules[MODULE]


def test_rows_name_ops_and_have_an_amount(rows: Any) -> None:
    timed = rows.benches()
    assert all(max(row.bytes, row.flops) > 0 for row in timed)
    assert all(getattr(rows.kernels, row.op) for row in (*timed, *rows.checks()))
    names = [(row.op, row.shape) for row in timed]
    assert len(set(names)) == len(names)


def test_checks_build_the_problems_of_their_ops(rows: Any) -> None:
    built = [(row, PROBLEMS[row.op](**row.make())) for row in rows.checks() if row.op in PROBLEMS]
    assert {row.op for row, _ in built} == set(PROBLEMS)
    latents = [(row, p) for row, p in built if isinstance(p, LatentAttentionProblem)]
    expanded = [row.shape for row, p in latents if takes_expanded(p)]
    assert expanded == [row.shape for row, _ in latents if row.flops] == ["expanded"]


def test_amounts_of_latent_attention(rows: Any) -> None:
    """A decode reads rows of 576, and little more; a prompt's products are made of its latents."""
    decode = next(row for row in rows.benches() if row.op == "latent_attention")
    assert decode.shape == "decode 64 x 4096"
    assert 1.0 < decode.bytes / (64 * 4096 * 576 * 2) < 1.06
    prompt = rows.latents("one", [(4096, 4096)])
    made = 2 * 4096 * 32 * 256 * 512
    assert prompt.flops == pytest.approx(made + 2 * 32 * 320 * (4096 * 4097 / 2))
