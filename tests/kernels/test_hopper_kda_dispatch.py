# SPDX-License-Identifier: Apache-2.0
"""When Kimi delta attention runs in CUDA C++, and when in Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import strided
from tests.kernels.test_kda import Decoder, prefill
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.journal import Journal, JournalMemory, JournalSize
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.registry import Implementation
from vllm.model_executor.layers.fla.ops.kda import hopper
from vllm.model_executor.layers.fla.ops.kda.hopper import (
    HEADS_OF_ONE_LAUNCH,
    hopper_prefill,
    takes_prefill,
)
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import MAX_PLACES, takes_decode
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaPrefill

BF16 = torch.bfloat16


def problem(
    dk: int = 128, dv: int = 128, dtype: torch.dtype = BF16, extra: int = 8, heads: int = 2
) -> KdaPrefill:
    made = prefill([70], [False], (heads, dk, dv), "cpu", dtype)
    a = strided(made.gates.a.flatten(1), extra).unflatten(1, (heads, dk))
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


@pytest.mark.parametrize("heads", [1, HEADS_OF_ONE_LAUNCH - 1, HEADS_OF_ONE_LAUNCH])
def test_a_layer_s_heads_decide_between_one_launch_and_two(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("prefill_at_once", "prefill_in_stages"):
        monkeypatch.setattr(hopper, name, lambda p, name=name: calls.append(name))
    hopper_prefill(problem(heads=heads))
    at_once = heads == HEADS_OF_ONE_LAUNCH
    assert calls == ["prefill_at_once" if at_once else "prefill_in_stages"]


# ---- decodes -------------------------------------------------------------------------------------


def decode(
    size: tuple[int, int, int] = (2, 128, 128), taps: int = 4, journal: JournalSize | None = None,
    **changes: Any,
) -> KdaDecode:  # fmt: skip
    """A step of one token that is taken, but for the changes, also of the gates."""
    made = Decoder(NaiveKernels(), 1, size, "cpu", dtype=BF16, taps=taps)
    qkv, a, b = (x[0] for x in made.tokens(1))
    gates = replace(made.gates, a=a, b=b)
    own = {name: changes.pop(name) for name in vars(gates) if name in changes}
    step = KdaDecode(
        qkv,
        replace(gates, **own),
        made.weight,
        made.conv_state,
        made.state,
        made.indices,
        qkv.new_empty(1, size[0], size[2]),
        None if journal is None else journal_of(made, journal),
    )
    return replace(step, **changes)


def journal_of(decoder: Decoder, size: JournalSize) -> Journal:
    memory = JournalMemory.create(decoder.journal_shape(), 1, 1, size, "cpu")
    none, steps = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    counts = none, none, none
    return memory.stack(steps, counts, [decoder.state], [decoder.conv_state]).layer(0)


def every_other(x: Tensor) -> Tensor:
    """The same values two elements apart."""
    return torch.stack([x, x], dim=-1)[..., 0]


def test_what_decodes_are_taken() -> None:
    p = decode()
    assert takes_decode(p)
    assert takes_decode(decode(journal=JournalSize(MAX_PLACES)))
    assert takes_decode(decode(state=p.state.to(BF16)))
    assert takes_decode(decode(qkv=strided(p.qkv), b=strided(p.gates.b, 1)))


BASE = decode()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"qkv": BASE.qkv.half()}, id="fp16"),
        pytest.param({"a": BASE.gates.a.float()}, id="wide gates"),
        pytest.param({"A_log": BASE.gates.A_log.to(BF16)}, id="narrow rates"),
        pytest.param({"size": (2, 64, 128)}, id="narrow keys"),
        pytest.param({"size": (2, 128, 64)}, id="narrow values"),
        pytest.param({"taps": 3}, id="three taps"),
        pytest.param({"conv_state": BASE.conv_state.float()}, id="wide inputs"),
        pytest.param({"state": BASE.state.half()}, id="fp16 state"),
        pytest.param({"journal": JournalSize(MAX_PLACES + 1)}, id="many places"),
        pytest.param({"journal": JournalSize(7, 2)}, id="drafts"),
        pytest.param({"qkv": strided(BASE.qkv, 2)}, id="token stride"),
        pytest.param({"qkv": every_other(BASE.qkv)}, id="every other channel"),
        pytest.param({"qkv": strided(BASE.qkv, 4)[:, 2:-2]}, id="token offset"),
        pytest.param({"a": strided(BASE.gates.a)}, id="heads apart"),
        pytest.param({"out": strided(BASE.out)}, id="outputs apart"),
        pytest.param({"conv_weight": BASE.conv_weight.T.contiguous().T}, id="taps apart"),
        pytest.param({"state": BASE.state.transpose(2, 3)}, id="transposed state"),
    ],
)
def test_what_decodes_are_left_to_triton(changes: dict[str, Any]) -> None:
    assert not takes_decode(decode(**changes))


def test_a_decode_that_is_taken_is_not_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[KdaDecode] = []
    recorder = Implementation(calls.append, takes_decode)
    monkeypatch.setattr(hopper, "kda_decode", recorder)
    taken, none = decode(), decode(state_indices=torch.empty(0, dtype=torch.int32))
    CudaKernels().kda_decode(taken)
    CudaKernels().kda_decode(none)
    assert calls == [taken]
