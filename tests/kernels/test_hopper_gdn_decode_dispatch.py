# SPDX-License-Identifier: Apache-2.0
"""Which decode steps of the gated delta rule `vllm_cuda` takes, and with what it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import gdn_decode_case, strided
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.hopper_gdn import HopperGdn
from vllm.kernels.hopper_gdn_decode import MAX_PLACES, takes_decode
from vllm.kernels.journal import GatedNorm, Journal, JournalMemory, JournalShape, JournalSize

HEADS = (1, 2, 128, 128)
BF16 = torch.bfloat16


def journal_of(size: JournalSize) -> Journal:
    memory = JournalMemory(JournalShape(*HEADS, torch.float32), 1, 1, size, "cpu")
    states = [torch.zeros(1, 2, 128, 128)]
    counts = tuple(torch.zeros(1, dtype=torch.int32) for _ in range(3))
    steps = torch.zeros(1, 4, dtype=torch.int32)
    return memory.stack(steps, counts, states, [torch.zeros(1, 3, 512)]).layer(0)


def problem(**changes: Any) -> dict[str, Any]:
    """Arguments of `takes_decode`, all of which it takes, but for the changes."""
    case = gdn_decode_case(1, HEADS, BF16, "cpu")
    names = ("qkv", "a", "b", "conv_weight", "conv_state", "ssm_state", "out")
    norm = GatedNorm(torch.ones(1, 2, 128, dtype=BF16), torch.ones(128, dtype=BF16), 1e-6)
    given = {name: case[name] for name in names}
    return given | dict(heads=HEADS, journal=journal_of(JournalSize(7)), norm=norm) | changes


def every_other(x: Tensor) -> Tensor:
    """The same values two elements apart."""
    return torch.stack([x, x], dim=-1)[..., 0]


def test_what_is_taken() -> None:
    assert takes_decode(**problem())
    assert takes_decode(**problem(journal=None, norm=None))
    assert takes_decode(**problem(ssm_state=problem()["ssm_state"].to(BF16)))
    norm = problem()["norm"]
    assert takes_decode(**problem(norm=replace(norm, weight=norm.weight.float())))


BASE = problem()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"qkv": BASE["qkv"].half()}, id="fp16"),
        pytest.param({"a": BASE["a"].float()}, id="wide gates"),
        pytest.param({"heads": (1, 2, 64, 128)}, id="narrow keys"),
        pytest.param({"heads": (1, 2, 128, 64)}, id="narrow values"),
        pytest.param({"heads": (1, 3, 128, 128)}, id="groups of three"),
        pytest.param({"conv_weight": BASE["conv_weight"][:, :3]}, id="three taps"),
        pytest.param({"conv_state": BASE["conv_state"].float()}, id="wide inputs"),
        pytest.param({"ssm_state": BASE["ssm_state"].half()}, id="fp16 state"),
        pytest.param({"journal": journal_of(JournalSize(MAX_PLACES + 1))}, id="many places"),
        pytest.param({"journal": journal_of(JournalSize(7, 2))}, id="drafts"),
        pytest.param({"qkv": strided(BASE["qkv"], 2)}, id="token stride"),
        pytest.param({"qkv": every_other(BASE["qkv"])}, id="every other channel"),
        pytest.param({"qkv": strided(BASE["qkv"])[:, 2:]}, id="token offset"),
        pytest.param({"conv_weight": BASE["conv_weight"].T.contiguous().T}, id="taps apart"),
        pytest.param({"out": strided(BASE["out"])}, id="heads apart"),
        pytest.param({"ssm_state": BASE["ssm_state"].transpose(2, 3)}, id="transposed state"),
        pytest.param(
            {"norm": replace(BASE["norm"], weight=BASE["norm"].weight.half())}, id="fp16 weight"
        ),
        pytest.param(
            {"norm": replace(BASE["norm"], gate=every_other(BASE["norm"].gate))}, id="gate apart"
        ),
    ],
)
def test_what_is_left_to_triton(changes: dict[str, Any]) -> None:
    assert not takes_decode(**problem(**changes))


def test_the_op_gets_what_the_layer_gives() -> None:
    calls: list[tuple[Any, ...]] = []
    kernels = CudaKernels(hopper=HopperGdn(decode=lambda *args: calls.append(args)))
    case = gdn_decode_case(2, HEADS, BF16, "cpu")
    given = problem()
    kernels.gdn_decode(**case, journal=given["journal"], norm=given["norm"] and None)
    (call,) = calls
    names = ("qkv", "a", "b", "A_log", "dt_bias", "conv_weight", "conv_bias", "conv_state",
             "ssm_state", "state_indices")  # fmt: skip
    assert all(got is case[name] for got, name in zip(call, names, strict=False))
    assert call[10] == 1 and call[11] is case["out"] and call[12] is given["journal"]
    assert call[13] is None and call[14] is False
