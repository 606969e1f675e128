# SPDX-License-Identifier: Apache-2.0
"""When prefills of Kimi delta attention run in CUDA C++, and when in Triton."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.kernels.cases import strided
from tests.kernels.test_kda import prefill
from vllm.model_executor.layers.fla.ops.kda.hopper import takes_prefill
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

BF16 = torch.bfloat16


def problem(dk: int = 128, dv: int = 128, dtype: torch.dtype = BF16, extra: int = 8) -> KdaPrefill:
    made = prefill([70], [False], (2, dk, dv), "cpu", dtype)
    a = strided(made.gates.a.flatten(1), extra).unflatten(1, (2, dk))
    return replace(made, qkv=strided(made.qkv, extra), gates=replace(made.gates, a=a))


def test_bfloat16_and_heads_of_128_are_taken() -> None:
    made = problem()
    assert takes_prefill(made)
    assert takes_prefill(replace(made, state=made.state.to(BF16)))


def test_others_are_not() -> None:
    assert not takes_prefill(problem(dk=64))
    assert not takes_prefill(problem(dv=64))
    assert not takes_prefill(problem(dtype=torch.float16))
    assert not takes_prefill(problem(dtype=torch.float32))
    assert not takes_prefill(problem(extra=4))
    made = problem()
    assert not takes_prefill(replace(made, state=made.state.half()))
    gates = made.gates
    for wrong in (dict(A_log=gates.A_log.to(BF16)), dict(b=gates.b.float())):
        assert not takes_prefill(replace(made, gates=replace(gates, **wrong)))
    apart = strided(made.out.flatten(1), 4).unflatten(1, made.out.shape[1:])
    assert not takes_prefill(replace(made, out=apart))
