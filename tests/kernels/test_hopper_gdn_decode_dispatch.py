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
from vllm.kernels.journal import GatedNorm, Journal, JournalMemory, JournalShape, JournalSize
from vllm.model_executor.layers.fla.ops.gated_delta_rule import hopper
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_decode import (
    MAX_PENDING,
    MAX_TOKENS,
    takes_decode,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode

HEADS = (1, 2, 128, 128)
BF16 = torch.bfloat16


def journal_of(size: JournalSize, input_dtype: torch.dtype = BF16) -> Journal:
    shape = JournalShape(*HEADS, torch.float32, channels=512, input_dtype=input_dtype)
    memory = JournalMemory.create(shape, 1, 1, size, "cpu")
    states = [torch.zeros(1, 2, 128, 128)]
    counts = tuple(torch.zeros(1, dtype=torch.int32) for _ in range(3))
    steps = torch.zeros(1, 4, dtype=torch.int32)
    return memory.stack(steps, counts, states, [torch.zeros(1, 3, 512)]).layer(0)


def problem(heads: tuple[int, int, int, int] = HEADS, **changes: Any) -> GdnDecode:
    """A step that is taken, but for the changes."""
    norm = GatedNorm(torch.ones(1, 2, 128, dtype=BF16), torch.ones(128, dtype=BF16), 1e-6)
    given = gdn_decode_case(1, heads, BF16, "cpu") | dict(journal=journal_of(JournalSize(7)))
    return GdnDecode(**given | dict(norm=norm) | changes)


def tokens_of(count: int) -> dict[str, Any]:
    """So many tokens of the sequence."""
    given = problem()
    changes = {name: getattr(given, name).expand(count, -1) for name in ("qkv", "a", "b")}
    return changes | {
        "journal": journal_of(JournalSize(4, count)),
        "out": given.out.repeat(count, 1, 1),
    }


def every_other(x: Tensor) -> Tensor:
    """The same values two elements apart."""
    return torch.stack([x, x], dim=-1)[..., 0]


def test_what_is_taken() -> None:
    p = problem()
    assert takes_decode(p) and p.norm is not None
    assert takes_decode(problem(journal=None, norm=None))
    assert takes_decode(problem(ssm_state=p.ssm_state.to(BF16)))
    assert takes_decode(problem(norm=replace(p.norm, weight=p.norm.weight.float())))
    assert takes_decode(problem(journal=journal_of(JournalSize(MAX_PENDING, 8))))
    assert takes_decode(problem(**tokens_of(MAX_TOKENS)))


BASE = vars(problem())


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
        pytest.param({"journal": journal_of(JournalSize(MAX_PENDING + 1))}, id="much pending"),
        pytest.param(tokens_of(MAX_TOKENS + 1), id="many tokens"),
        pytest.param({"journal": journal_of(JournalSize(7, 2), torch.float32)}, id="wide drafts"),
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
    assert not takes_decode(problem(**changes))


def test_a_step_that_is_taken_is_not_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[GdnDecode] = []
    recorder = replace(hopper.gdn_decode, run=calls.append, needs=None)
    monkeypatch.setattr(hopper, "gdn_decode", recorder)
    taken, none = problem(), problem(state_indices=torch.empty(0, dtype=torch.int32))
    CudaKernels().gdn_decode(taken)
    CudaKernels().gdn_decode(none)
    assert calls == [taken]
