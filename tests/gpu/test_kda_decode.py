# SPDX-License-Identifier: Apache-2.0
"""The decode step of Kimi delta attention in CUDA C++: against fp64 and Triton, its bits, and in
graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels import drafts
from tests.kernels.cases import error_ratio, strided
from tests.kernels.drafts import difference
from tests.kernels.test_kda import Decoder
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.interface import Kernels
from vllm.kernels.linear.skinny import OPS, skinny_linear
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.kda import hopper_decode as hopper_decode_module
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import (
    MAX_PLACES,
    hopper_decode,
    takes_decode,
)
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
MODEL, SHARD = (32, 128, 128), (3, 128, 128)


def decoder(
    kernels: Kernels, num_seqs: int, size: tuple[int, int, int], state_dtype: torch.dtype = F32
) -> Decoder:
    return Decoder(kernels, num_seqs, size, "cuda", dtype=BF16, state_dtype=state_dtype)


def step_of(decoder: Decoder) -> KdaDecode:
    """A step of random tokens."""
    qkv, a, b = (strided(x[0].flatten(1)).unflatten(1, x.shape[2:]) for x in decoder.tokens(1))
    return KdaDecode(
        qkv,
        replace(decoder.gates, a=a, b=b),
        decoder.weight,
        decoder.conv_state,
        decoder.state,
        decoder.indices,
        qkv.new_full((len(qkv), *decoder.state.shape[1:3]), torch.nan),
    )


def copied(p: KdaDecode) -> KdaDecode:
    return replace(p, conv_state=p.conv_state.clone(), state=p.state.clone(), out=p.out.clone())


@pytest.mark.parametrize("size", [MODEL, SHARD])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_fp64(kernels: CudaKernels, size: tuple[int, int, int], state_dtype: torch.dtype) -> None:
    """No further from it than Triton; nothing but a sequence's own blocks and row of `out` is
    touched."""
    for num_seqs in (2, 9, 70):
        found = decoder(kernels, num_seqs, size, state_dtype)
        triton, exact = found.copy(CudaKernels()), found.copy(NaiveKernels(), widened=True)
        indices = found.indices.clone()
        indices[-1] = -1
        for _ in range(3):
            tokens = [x[0] for x in found.tokens(1)]
            ours, theirs = (d.decode(tokens, indices) for d in (found, triton))
            expected = exact.decode([x.double() for x in tokens], indices)
            ratio = error_ratio(ours[:-1], expected[:-1])
            assert ratio < 1.02 * error_ratio(theirs[:-1], expected[:-1]) < 7e-3
            assert ours[-1].isnan().all()
        assert error_ratio(found.state, exact.state) < 1.02 * error_ratio(triton.state, exact.state)
        assert torch.equal(found.conv_state.nan_to_num(), triton.conv_state.nan_to_num())


@pytest.mark.parametrize("interval", [3, 8, MAX_PLACES + 1])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_deferred_bits_are_immediate_bits(
    kernels: CudaKernels,
    interval: int,
    state_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over random commits, the last of which is the Triton kernel's."""
    monkeypatch.setattr(drafts, "INTERVAL", interval)
    assert difference(decoder(kernels, 5, SHARD, state_dtype), 1, length=3 * interval) == 0.0


def test_the_journal_is_that_of_triton(
    kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, decays and errors of steps with every number of tokens pending, in a circle."""
    monkeypatch.setattr(drafts, "INTERVAL", 8)
    found, stacks = decoder(kernels, 7, SHARD), []
    tokens = [[x[0] for x in found.tokens(1)] for _ in range(7)]
    for one in (found, found.copy(CudaKernels())):
        stacks.append(one.stack(1))
        for pending, given in enumerate(tokens):
            rows = [[6 - i, pending, 0, i] for i in range(7)]
            stacks[-1].steps.copy_(torch.tensor(rows))
            one.decode(given, one.indices, stacks[-1])
    for name in ("keys", "decays", "errors"):
        ours, theirs = (getattr(stack, name) for stack in stacks)
        assert error_ratio(ours, theirs.double()) < 2e-4


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_bits_do_not_depend_on_the_batch(kernels: CudaKernels, state_dtype: torch.dtype) -> None:
    step = step_of(decoder(kernels, 70, MODEL, state_dtype))
    whole = copied(step)
    kernels.kda_decode(whole)
    rows = slice(7, 11)
    gates = replace(step.gates, a=step.gates.a[rows], b=step.gates.b[rows])
    few = replace(
        copied(step), qkv=step.qkv[rows], gates=gates, state_indices=step.state_indices[rows],
        out=step.out[rows].clone(),
    )  # fmt: skip
    kernels.kda_decode(few)
    assert torch.equal(few.out, whole.out[rows])
    used = step.state_indices[rows].long()
    assert torch.equal(few.state[used], whole.state[used])
    assert torch.equal(few.conv_state[used], whole.conv_state[used])


def chain(decoders: list[Decoder], weight: Tensor, x: Tensor, outs: list[Tensor]) -> None:
    """Each step reads the projection of what the one before wrote, and may start before it."""
    heads = decoders[0].size[0]
    for one, out in zip(decoders, outs, strict=True):
        parts = skinny_linear(x, weight, None, True)
        qkv, a, b = parts.split([3 * heads * 128, heads * 128, heads], dim=-1)
        gates = replace(one.gates, a=a.unflatten(1, (heads, 128)), b=b)
        one.kernels.kda_decode(
            KdaDecode(qkv, gates, one.weight, one.conv_state, one.state, one.indices, out)
        )
        x = out.flatten(1)


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_a_replayed_chain_equals_kernels_one_after_the_other(
    kernels: CudaKernels, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OPS.choose(HOPPER)
    decoders = [decoder(kernels, num_seqs, MODEL) for _ in range(5)]
    weight = torch.randn(4 * 4096 + 32, 4096, dtype=BF16, device="cuda") / 64
    x = torch.randn(num_seqs, 4096, dtype=BF16, device="cuda")
    outs = [torch.empty(num_seqs, 32, 128, dtype=BF16, device="cuda") for _ in decoders]
    before = [(d.state.clone(), d.conv_state.clone()) for d in decoders]

    def reset() -> None:
        for one, (state, conv_state) in zip(decoders, before, strict=True):
            one.state.copy_(state)
            one.conv_state.copy_(conv_state)

    def results() -> list[Tensor]:
        return [*outs, *(x for d in decoders for x in d.states())]

    with monkeypatch.context() as patch:
        patch.setattr(hopper_decode_module, "overlaps_launches", lambda device: False)
        chain(decoders, weight, x, outs)
    expected = [result.clone() for result in results()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(decoders, weight, x, outs)
    for _ in range(10):
        reset()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def test_what_the_kernel_cannot_read_is_refused(kernels: CudaKernels) -> None:
    step = step_of(decoder(kernels, 2, SHARD))
    assert takes_decode(step)
    for why, changes in (
        ("qkv must be bfloat16", dict(qkv=step.qkv.float())),
        ("a must be", dict(gates=replace(step.gates, a=step.gates.a.half()))),
        ("state_indices must be int32", dict(state_indices=step.state_indices.long())),
        ("state must be", dict(state=step.state.half())),
        ("conv_state must be", dict(conv_state=step.conv_state[:, :2])),
        ("conv_weight must be dense", dict(conv_weight=step.conv_weight[:, :3])),
    ):
        with pytest.raises(RuntimeError, match=why):
            hopper_decode(replace(step, **changes))
