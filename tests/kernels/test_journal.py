# SPDX-License-Identifier: Apache-2.0
"""Decode that writes the state every few tokens: the very bits of writing it with each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.kernels.cases import error_ratio, gdn_decode_case, randn, strided, widen
from tests.kernels.journals import SLOTS, SMALL, Layers, Schedule, both_ways, rings, run, two_layers
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import GatedNorm, JournalMemory, JournalShape, JournalSize
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode

pytestmark = pytest.mark.slow

#: of a short schedule that does everything, see `test_the_schedule_does_everything`
STEPS, SEED = 9, 27
BOTH = pytest.mark.parametrize("kernels", [NaiveKernels(), CudaKernels()], ids=["naive", "triton"])
F64 = torch.float64


@BOTH
@pytest.mark.parametrize("heads", [SMALL, pytest.param((1, 4, 40, 8), marks=pytest.mark.nightly)])
def test_the_same_bits_over_a_random_schedule(kernels, heads, device):
    layers = two_layers(3, heads, torch.float32, device, padding=1)
    assert both_ways(kernels, layers, heads, STEPS, SEED)


def test_the_schedule_does_everything(monkeypatch):
    """With every number of pending tokens a sequence goes on, commits and is flushed."""
    begun: set[tuple[int, int]] = set()
    flushed: set[int] = set()
    begin, flush = Schedule.begin, Schedule.flush

    def noted_begin(self: Schedule, *args: Any) -> None:
        begin(self, *args)
        begun.update((pending, commits) for _, pending, commits, _ in self.stack.steps[:3].tolist())

    def noted_flush(self: Schedule, kernels: Kernels, layers: Layers, which: list[int]) -> None:
        flushed.update(self.pending[i] for i in which)
        flush(self, kernels, layers, which)

    monkeypatch.setattr(Schedule, "begin", noted_begin)
    monkeypatch.setattr(Schedule, "flush", noted_flush)
    layers = two_layers(3, SMALL, torch.float32, "cpu", padding=1)
    run(NaiveKernels(), layers, rings(layers, SMALL, rows=9), STEPS, SEED)
    assert begun == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (SLOTS, 1)}
    assert flushed == {1, 2, SLOTS}


@BOTH
def test_the_same_bits_of_a_rounded_state(kernels, device):
    """A state in 16 bits is rounded after every token, committed, replayed or flushed."""
    layers = two_layers(3, SMALL, torch.float32, device, state_dtype=torch.float16)
    for steps in (3, 6):
        assert both_ways(kernels, layers, SMALL, steps)


@pytest.mark.parametrize(("width", "bias"), [(2, False), (3, True)])
def test_convolutions(width, bias, device):
    layers = two_layers(2, SMALL, torch.float32, device, width=width, bias=bias)
    assert both_ways(CudaKernels(), layers, SMALL, steps=3)
    wide = Layers([{k: widen(v) for k, v in case.items()} for case in layers.cases])
    found, expected = run(CudaKernels(), layers, None, 3), run(NaiveKernels(), wide, None, 3)
    assert error_ratio(torch.stack(found), torch.stack(expected)) < 1e-5


def test_a_commit_more_or_less_is_noticed(device, monkeypatch):
    """The comparison sees a token that is replayed twice, and one that is not replayed."""
    layers = two_layers(2, SMALL, torch.float32, device)
    begin = Schedule.begin
    for change in (1, -1):

        def shifted(self: Schedule, *args: Any, change: int = change) -> None:
            begin(self, *args)
            pending = self.stack.steps[:, 1]
            pending += change * ((pending > 0) & (pending < SLOTS - 1))

        monkeypatch.setattr(Schedule, "begin", shifted)
        assert not both_ways(NaiveKernels(), layers, SMALL, steps=12)


def test_the_reference_in_fp64_agrees_with_both(device):
    layers = two_layers(3, SMALL, torch.float32, device, padding=1)
    wide = Layers([{k: widen(v) for k, v in case.items()} for case in layers.cases]).copy()
    expected = run(NaiveKernels(), wide, rings(wide, SMALL, rows=8), 8)
    for kernels in (NaiveKernels(), CudaKernels()):
        copy = layers.copy()
        found = run(kernels, copy, rings(copy, SMALL, rows=8), 8)
        assert error_ratio(torch.stack(found), torch.stack(expected)) < 1e-5
        for state, exact in zip(copy.states(), wide.states(), strict=True):
            assert error_ratio(state, exact) < 1e-5


@pytest.mark.parametrize("kernels", [NaiveKernels(), CudaKernels()], ids=["naive", "triton"])
@pytest.mark.parametrize("heads", [(1, 1, 12, 40)])
@pytest.mark.parametrize("num_seqs", [2, 33])
def test_the_norm_is_that_of_the_separate_op(kernels, heads, num_seqs, device):
    """Fused or not, and into the tensor that is normed."""
    case = gdn_decode_case(num_seqs, heads, torch.float32, device)
    n, dv = len(case["out"]), heads[3]
    norm = GatedNorm(
        strided(randn(n, heads[1] * dv, dtype=torch.float32, device=device)).unflatten(1, (-1, dv)),
        randn(dv, dtype=torch.float32, device=device),
        1e-6,
    )
    plain = case | {name: case[name].clone() for name in ("ssm_state", "conv_state", "out")}
    kernels.gdn_decode(GdnDecode(**case, norm=norm))
    kernels.gdn_decode(GdnDecode(**plain))
    expected = NaiveKernels().gated_rms_norm(
        plain["out"].double(), norm.gate.double(), norm.weight.double(), norm.eps
    )
    assert error_ratio(case["out"].flatten(1), expected) < 1e-6
    into = kernels.gated_rms_norm(plain["out"], norm.gate, norm.weight, norm.eps, plain["out"])
    assert into.data_ptr() == plain["out"].data_ptr()
    assert error_ratio(into, expected) < 1e-6


def test_cpu_journals_over_a_random_schedule():
    layers = two_layers(3, (1, 2, 20, 7), torch.float32, "cpu", padding=1)
    assert both_ways(CpuKernels(), layers, (1, 2, 20, 7), STEPS, SEED)


@pytest.mark.parametrize("kernels", [NaiveKernels(), CpuKernels()], ids=["naive", "cpu"])
def test_more_tokens_than_places_are_refused(kernels):
    layers = two_layers(1, SMALL, torch.float32, "cpu")
    stack = rings(layers, SMALL, rows=1)
    stack.steps[0] = torch.tensor([0, SLOTS, 0, 0])
    with pytest.raises((ValueError, RuntimeError), match=f"{SLOTS} (pending )?tokens|row 0 has"):
        kernels.gdn_decode(GdnDecode(**layers.cases[0], journal=stack.layer(0)))


def test_a_wide_convolution_is_refused(device):
    case = gdn_decode_case(1, SMALL, torch.float32, device, width=5)
    with pytest.raises(ValueError, match="width 5"):
        CudaKernels().gdn_decode(GdnDecode(**case))


def test_memory_is_what_the_shape_says():
    shape = JournalShape(16, 32, 128, 128, torch.bfloat16)
    assert shape.token_bytes == (16 * 128 + 32 * 128 + 32) * 4
    memory = JournalMemory.create(shape, 3, 5, JournalSize(7), "cpu")
    assert sum(t.nbytes for t in memory.tensors) == 3 * 5 * 7 * shape.token_bytes
    wide = replace(shape, channels=64, input_dtype=torch.bfloat16)
    size = JournalSize(7, 4)
    memory = JournalMemory.create(wide, 3, 5, size, "cpu")
    per_row = size.places * wide.token_bytes + size.inputs * wide.input_bytes
    assert (size.places, size.inputs) == (10, 3)
    assert sum(t.nbytes for t in memory.tensors) == 3 * 5 * per_row
    assert replace(shape, state_dtype=F64).token_bytes == 2 * shape.token_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(16, 32, 128, 128), (4, 8, 128, 128), (2, 8, 64, 96)])
def test_compiled_bits(state_dtype, heads):
    """Of the model's sizes and of a shard's, in bf16, also against the reference."""
    layers = two_layers(19, heads, torch.bfloat16, "cuda", state_dtype=state_dtype, padding=2)
    assert both_ways(CudaKernels(), layers, heads, steps=20)
    case = layers.cases[0]
    wide = Layers([{k: widen(v) for k, v in case.items()}])
    found = run(CudaKernels(), Layers([case]), None, 4)
    assert error_ratio(torch.stack(found), torch.stack(run(NaiveKernels(), wide, None, 4))) < 1e-2


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others():
    """One sequence of many, alone: the same bits, whatever the number of programs."""
    heads = (16, 32, 128, 128)
    case = gdn_decode_case(70, heads, torch.bfloat16, "cuda")
    alone = {
        name: value[7:8] if name in ("qkv", "a", "b", "state_indices", "out") else value.clone()
        if name in ("ssm_state", "conv_state") else value
        for name, value in case.items()
    }  # fmt: skip
    alone["out"] = alone["out"].clone()
    CudaKernels().gdn_decode(GdnDecode(**case))
    CudaKernels().gdn_decode(GdnDecode(**alone))
    assert torch.equal(alone["out"][0], case["out"][7])
    index = int(case["state_indices"][7])
    assert torch.equal(alone["ssm_state"][index], case["ssm_state"][index])


@pytest.mark.gpu
@pytest.mark.usefixtures("own_stream")
def test_one_graph_serves_every_step():
    """What a step does lies in the staged array: a replayed graph reads it anew."""
    heads = (16, 32, 128, 128)
    layers = two_layers(4, heads, torch.bfloat16, "cuda")
    layers.cases = layers.cases[:1]
    eager, replayed = layers.copy(), layers.copy()
    outputs = []
    for copy, captured in ((eager, False), (replayed, True)):
        (case,) = copy.cases
        stack = rings(copy, heads, rows=4)
        stack.steps.zero_()
        before = [case[name].clone() for name in ("ssm_state", "conv_state")]
        step = partial(CudaKernels().gdn_decode, GdnDecode(**case, journal=stack.layer(0)))
        if captured:
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                step()
            step = graph.replay
        for name, value in zip(("ssm_state", "conv_state"), before, strict=True):
            case[name].copy_(value)
        # Row i commits when i tokens are pending.
        rows, pending = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        found = []
        for _ in range(9):
            commits = (pending == rows).int()
            stack.steps.copy_(torch.stack([rows, pending, commits, rows * 0], dim=1))
            step()
            found.append(case["out"].clone())
            pending = torch.where(commits > 0, 0, pending + 1).int()
        outputs.append([*found, *copy.states()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
