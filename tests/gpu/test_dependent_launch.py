# SPDX-License-Identifier: Apache-2.0
"""Kernels that start before their predecessor ends still see all it wrote."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import attention_case
from vllm.kernels.activation import triton as activation
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention import triton_decode as decode_attention
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.norm import triton as norm

pytestmark = pytest.mark.gpu
kernels = CudaKernels()
WIDTH = 4096


def _chain(x: Tensor, gate_up: Tensor, weight: Tensor, case: dict) -> list[Tensor]:
    """Each kernel reads what the one before wrote, of programs that take unequal time."""
    results = []
    hidden, residual = x, x
    for _ in range(20):
        hidden, residual = kernels.fused_add_rms_norm(hidden, residual, weight, 1e-6)
        torch.add(gate_up, hidden.repeat(1, 2), out=gate_up)
        hidden = kernels.silu_and_mul(gate_up)
        hidden = kernels.rms_norm(hidden, weight, 1e-6)
        query = kernels.rms_norm(hidden.view(-1, 16, 256), weight[:256], 1e-6)
        out = torch.empty_like(query)
        kernels.paged_attention(AttentionProblem(**case | dict(query=query, out=out)))
        hidden = kernels.mul_sigmoid(out, query)
        results += [hidden, residual]
    return results


@pytest.mark.parametrize("rows", [1, 48])
@pytest.mark.usefixtures("own_stream")
def test_a_replayed_chain_equals_kernels_one_after_the_other(rows, monkeypatch):
    torch.manual_seed(0)
    case = attention_case([(1, 700)] * rows, (16, 4, 256), torch.bfloat16, "cuda")
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    gate_up = torch.randn(rows, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(WIDTH, dtype=torch.bfloat16, device="cuda")
    with monkeypatch.context() as patch:
        for module in (activation, decode_attention, norm):
            patch.setattr(module, "dependent_launch", lambda device: {"PDL": False})
        expected = _chain(x, gate_up.clone(), weight, case)
    own = gate_up.clone()
    _chain(x, own, weight, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        replayed = _chain(x, own, weight, case)
    for _ in range(20):
        own.copy_(gate_up)
        for result in replayed:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))
