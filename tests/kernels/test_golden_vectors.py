# SPDX-License-Identifier: Apache-2.0
"""Small numbers of Apriel2's mixers, worked out elsewhere: by the tests' own equations and by every
kernel that computes the same.

Random inputs compare kernels with the reference that is in the tree; these say that it is right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from apriel2_models import convolution, delta_rule, gated_norm
from torch import Tensor
from torch.nn.functional import softplus

from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnPrefill
from vllm.model_executor.layers.fla.ops.kda.problem import KdaGates, KdaPrefill

#: one head: queries, keys and values of three tokens, behind their convolutions
Q, K = [[1, 0], [0.5, -0.5], [0.2, 0.9]], [[0.6, 0.8], [1, -1], [0, 2]]
V, B = [[1, 2], [-1, 0.5], [0.25, -0.75]], [0, 2, -1]
A_LOG, BETA = -0.693147, [0.5, 0.880797, 0.268941]
#: by rule: what decays are made of and their bias, log decays, outputs and the final state, whose
#: rows are key channels
GDN: dict[str, Any] = {
    "a": [0, 1, -1],
    "bias": 0.25,
    "g": [-0.412970, -0.750965, -0.193436],
    "out": [[0.212132, 0.424264], [-0.625629, 0.305783], [0.317074, -0.048605]],
    "state": [[-0.379477, 0.524242], [0.543678, -0.186913]],
}
KDA: dict[str, Any] = {
    "a": [[0, 1], [1, -1], [-2, 0.5]],
    "bias": [0.25, -0.25],
    "g": [[-0.412970, -0.568436], [-0.750965, -0.125965], [-0.080112, -0.412970]],
    "out": [[0.212132, 0.424264], [-0.635398, 0.286246], [0.286110, 0.040718]],
    "state": [[-0.358390, 0.720391], [0.494133, -0.101098]],
}
RULES = {"gdn": GDN, "kda": KDA}
TAPS, INPUTS = [0.1, -0.2, 0.3, 0.5], [1, -1, 2, 0.5]
CONVOLVED = [0.311230, -0.090033, 0.311230, 0.873438]
NORMED = {"silu": [0.620324, -0.134863], "sigmoid": [0.620324, 0.067431]}


def assert_golden(found: Tensor, golden: Any) -> None:
    """To the digits that are given."""
    expected = torch.tensor(golden, dtype=torch.float64, device=found.device)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


# ---- the tests' equations ------------------------------------------------------------------------


def wide(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES)
def test_the_equations_of_the_delta_rules(rule: str) -> None:
    golden, beta = RULES[rule], wide(B).sigmoid()
    g = -wide(A_LOG).exp() * softplus(wide(golden["a"]) + wide(golden["bias"]))
    assert_golden(g, golden["g"])
    assert_golden(beta, BETA)
    out, state = delta_rule(wide(Q), wide(K), wide(V), g, beta)
    assert_golden(out, golden["out"])
    assert_golden(state, golden["state"])


def test_the_equations_of_convolution_and_norm() -> None:
    assert_golden(convolution(wide(INPUTS)[:, None], wide([[TAPS]]))[:, 0], CONVOLVED)
    for activation, golden in NORMED.items():
        normed = gated_norm(wide([3, 4]), wide([1, -2]), wide([1, 0.5]), 1e-5, activation)
        assert_golden(normed, golden)


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.fixture(params=["naive", "triton", "cpu"])
def kernels(request: pytest.FixtureRequest, device: str) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    made = {"naive": NaiveKernels, "triton": CudaKernels, "cpu": CpuKernels}[request.param]
    return made()


def prefill(
    kernels: Kernels, rule: str, qkv: Tensor, state: Tensor, starts: list[int], carried: list[bool]
) -> Tensor:
    """`out [tokens, 2]` of one head: `qkv [tokens, 6]`, of which `a` and `b` are those of the
    tokens above in turn; `state [sequences, dv, dk]` is overwritten."""
    golden, device, tokens = RULES[rule], qkv.device, len(qkv)

    def made(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    times = tokens // 3
    a = made(golden["a"] * times)
    b, A_log, bias = made(B * times)[:, None], made([A_LOG]), made([golden["bias"]])
    out = torch.full((tokens, 1, 2), torch.nan, device=device)
    chunk_indices, chunk_offsets = chunk_metadata(starts)
    batch: dict[str, Any] = dict(
        state_indices=torch.arange(len(state), dtype=torch.int32, device=device),
        has_initial_state=torch.tensor(carried, device=device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        chunk_indices=chunk_indices.to(device),
        chunk_offsets=chunk_offsets.to(device),
        out=out,
    )
    memory = state[:, None]
    if rule == "gdn":
        kernels.gdn_prefill(GdnPrefill(qkv, a[:, None], b, A_log, bias, memory, **batch))
    else:
        kernels.kda_prefill(KdaPrefill(qkv, KdaGates(a[:, None], b, A_log, bias), memory, **batch))
    return out[:, 0]


@pytest.mark.parametrize("rule", RULES)
def test_the_delta_rules(rule: str, kernels: Kernels, device: str) -> None:
    """Into a block that held NaN."""
    qkv = torch.cat([torch.tensor(x, device=device) for x in (Q, K, V)], dim=-1).float()
    state = torch.full((1, 2, 2), torch.nan, device=device)
    assert_golden(prefill(kernels, rule, qkv, state, [0, 3], [False]), RULES[rule]["out"])
    assert_golden(state[0].mT, RULES[rule]["state"])


@pytest.mark.parametrize("rule", RULES)
def test_decays_and_strengths(rule: str, kernels: Kernels, device: str) -> None:
    """A key of zeros leaves what a state of ones decayed to; where no state is read, a key `[1, 0]`
    writes the values `[1, 1]`, as strong as beta."""
    qkv = torch.zeros(6, 6, device=device)
    qkv[3:, 2], qkv[3:, 4:] = 1, 1
    state = torch.ones(6, 2, 2, device=device)
    prefill(kernels, rule, qkv, state, list(range(7)), [True] * 3 + [False] * 3)
    channels = RULES[rule]["g"] if rule == "kda" else [[g, g] for g in RULES[rule]["g"]]
    assert_golden(state[:3].log(), [[one, one] for one in channels])
    assert_golden(state[3:], [[[beta, 0], [beta, 0]] for beta in BETA])


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 3, 4]])
def test_the_convolution(cuts: list[int], kernels: Kernels, device: str) -> None:
    """At once and in parts; what is left are the last three inputs, oldest first."""
    x = torch.tensor(INPUTS, dtype=torch.float32, device=device)[:, None]
    taps, out = torch.tensor([TAPS], device=device), torch.full_like(x, torch.nan)
    state = torch.full((1, 3, 1), torch.nan, device=device)
    for begin, end in zip(cuts, cuts[1:], strict=False):
        kernels.causal_conv1d(
            x[begin:end],
            taps,
            None,
            state,
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.tensor([begin > 0], device=device),
            torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            out=out[begin:end],
        )
    assert_golden(out[:, 0], CONVOLVED)
    assert_golden(state[0, :, 0], INPUTS[1:])


@pytest.mark.parametrize("activation", NORMED)
def test_the_gated_norm(activation: str, kernels: Kernels, device: str) -> None:
    """A gate of SiLU is part of the norm; that of sigmoid comes behind it."""
    x, gate, weight = (
        torch.tensor(one, dtype=torch.float32, device=device)
        for one in ([[[3, 4]]], [[[1, -2]]], [1, 0.5])
    )
    if activation == "silu":
        normed = kernels.gated_rms_norm(x, gate, weight, 1e-5)
    else:
        normed = kernels.mul_sigmoid(kernels.rms_norm(x, weight, 1e-5), gate)
    assert_golden(normed.view(-1), NORMED[activation])
