# SPDX-License-Identifier: Apache-2.0
"""Decode that writes the state every few tokens, and verifies drafts: the very bits of decoding
token by token and writing it with each."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio, gdn_decode_case, randn, strided, widen
from tests.nightly import nightly
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import (
    GatedNorm,
    JournalMemory,
    JournalShape,
    JournalSize,
    JournalStack,
)
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode

pytestmark = pytest.mark.slow

SMALL = (1, 2, 16, 24)
SLOTS = 3
#: of a short schedule that does everything, see `test_the_schedule_does_everything`
STEPS, SEED = 9, 27
BOTH = pytest.mark.parametrize("kernels", [NaiveKernels(), CudaKernels()], ids=["naive", "triton"])
F64 = torch.float64


@dataclass
class Layers:
    """Two layers' decode cases, whose states lie in one buffer as in the arena."""

    cases: list[dict[str, Any]]

    def copy(self) -> Layers:
        """The same with states of their own, in one buffer again."""
        states = torch.stack([case["ssm_state"] for case in self.cases])
        conv_states = torch.stack([case["conv_state"] for case in self.cases])
        return Layers(
            [
                case | dict(ssm_state=state, conv_state=conv_state)
                for case, state, conv_state in zip(self.cases, states, conv_states, strict=True)
            ]
        )

    def states(self) -> list[Tensor]:
        used = self.cases[0]["state_indices"].long()
        used = used[used >= 0]
        return [case[name][used] for case in self.cases for name in ("ssm_state", "conv_state")]


def two_layers(num_seqs: int, heads: tuple[int, int, int, int], dtype, device, **kwargs) -> Layers:
    cases = [gdn_decode_case(num_seqs, heads, dtype, device, **kwargs) for _ in range(2)]
    for name in ("state_indices", "ssm_state", "conv_state"):
        first = cases[0][name]
        cases[1][name] = first if name == "state_indices" else randn(
            *first.shape, dtype=first.dtype, device=device, scale=0.3
        )  # fmt: skip
    return Layers(cases).copy()


def rings(
    layers: Layers, heads: tuple[int, int, int, int], rows: int, width: int = 1
) -> JournalStack:
    states, conv_states = (
        [case[name] for case in layers.cases] for name in ("ssm_state", "conv_state")
    )
    device, conv = states[0].device, conv_states[0]
    shape = JournalShape(*heads, states[0].dtype, channels=conv.shape[2], input_dtype=conv.dtype)
    memory = JournalMemory.create(shape, 2, rows, JournalSize(SLOTS + width - 1, width), device)
    for tensor in memory.tensors:
        tensor.fill_(float("nan"))
    steps = torch.full((len(layers.cases[0]["state_indices"]), 4), -1, dtype=torch.int32)
    counts = tuple(torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3))
    return memory.stack(steps.to(device), counts, states, conv_states)


class Schedule:
    """Random commits, flushes and changes of row; what is pending, as the host knows it."""

    def __init__(self, num_seqs: int, stack: JournalStack, seed: int) -> None:
        self.random, self.stack = random.Random(seed), stack
        self.rows = list(range(num_seqs))
        self.pending = [0] * num_seqs

    def begin(self, kernels: Kernels, layers: Layers) -> None:
        """Tell the step what each sequence does, after flushing some of them."""
        flushed = [i for i, n in enumerate(self.pending) if n and self.random.random() < 0.15]
        self.flush(kernels, layers, flushed)
        spare = [r for r in range(self.stack.keys.shape[1]) if r not in self.rows]
        for i in flushed:
            self.rows[i], spare[0] = spare[0], self.rows[i]
        for i, pending in enumerate(self.pending):
            commits = pending == SLOTS or self.random.random() < 0.2
            self.stack.steps[i] = torch.tensor([self.rows[i], pending, int(commits), 0])
            self.pending[i] = 0 if commits else pending + 1
            self.stack.pending[self.rows[i]] = self.pending[i]

    def flush(self, kernels: Kernels, layers: Layers, which: list[int]) -> None:
        indices = layers.cases[0]["state_indices"].tolist()
        entries = [[self.rows[i], indices[i]] for i in which]
        if entries:
            device = self.stack.keys.device
            kernels.gdn_commit(self.stack, torch.tensor(entries, dtype=torch.int32, device=device))
        for i in which:
            self.pending[i] = 0


def run(
    kernels: Kernels, layers: Layers, stack: JournalStack | None, steps: int, seed: int = 0
) -> list[Tensor]:
    """Outputs of `steps` random tokens per sequence; at the end nothing is pending."""
    case = layers.cases[0]
    num_seqs = int((case["state_indices"] >= 0).sum())
    schedule = None if stack is None else Schedule(num_seqs, stack, seed)
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for _ in range(steps):
        if schedule is not None:
            schedule.begin(kernels, layers)
        for i, case in enumerate(layers.cases):
            for name in ("qkv", "a", "b"):
                value = torch.randn(case[name].shape, generator=generator)
                case[name] = strided(value.to(case[name].dtype).to(case[name].device))
            out = torch.full_like(case["out"], float("nan"))
            ring = None if stack is None else stack.layer(i)
            kernels.gdn_decode(GdnDecode(**case | dict(out=out), journal=ring))
            outputs.append(out[:num_seqs])
    if schedule is not None:
        schedule.flush(kernels, layers, [i for i, n in enumerate(schedule.pending) if n])
    return outputs


def both_ways(kernels: Kernels, layers: Layers, heads: Any, steps: int, seed: int = 0) -> bool:
    """Whether deferred outputs and states have the bits of immediate ones."""
    at_once, later = layers.copy(), layers.copy()
    expected = run(kernels, at_once, None, steps, seed)
    rows = len(layers.cases[0]["state_indices"]) + 5
    found = run(kernels, later, rings(later, heads, rows), steps, seed)
    pairs = zip(found + later.states(), expected + at_once.states(), strict=True)
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in pairs)


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


class Verifier:
    """Decodes known tokens `width` at a time: after the newest come drafts, of which a random
    number are the tokens that follow, and are then accepted."""

    def __init__(self, stack: JournalStack, num_seqs: int, interval: int, seed: int) -> None:
        self.random, self.stack, self.interval = random.Random(seed), stack, interval
        self.size = JournalSize(interval - 1 + stack.inputs.shape[2], stack.inputs.shape[2] + 1)
        self.done = [0] * num_seqs
        self.accepted: list[set[int]] = [set() for _ in range(num_seqs)]

    def step(self, kernels: Kernels, layers: Layers, tokens: list[dict[str, Tensor]], width: int):
        """Outputs of each sequence's accepted tokens, by layer: `[(sequence, token, output)]`."""
        stack, found = self.stack, []
        n = len(self.done)
        right = [min(self.random.randint(1, width), len(tokens[0]["qkv"]) - d) for d in self.done]
        for i in range(n):
            pending, first = int(stack.pending[i]), int(stack.first[i])
            commits = self.random.random() < 0.3 or pending + width > self.size.most_pending
            stack.steps[i] = torch.tensor([i, pending, int(commits), first])
            moved = (first + pending) % self.size.places if width > 1 else 0
            stack.first[i] = moved if commits else first
            stack.pending[i] = 0 if commits else pending + 1
        for layer, case in enumerate(layers.cases):
            given = {name: self.drafted(tokens[layer][name], right, width) for name in PROJECTED}
            heads = case["out"].shape[1:]
            out = given["qkv"].new_full((n * width, *heads), float("nan"))
            index = case["state_indices"][:n]
            call = case | given | dict(out=out, state_indices=index)
            kernels.gdn_decode(GdnDecode(**call, journal=stack.layer(layer)))
            for i in range(n):
                found += [(layer, i, self.done[i] + t, out[i * width + t]) for t in range(right[i])]
        for i in range(n):
            stack.pending[i] += right[i] - 1
            stack.taken[i] = right[i] - 1
            self.done[i] += right[i]
            self.accepted[i].add(right[i])
        return found

    def drafted(self, tokens: Tensor, right: list[int], width: int) -> Tensor:
        rows = torch.randn(len(right) * width, *tokens.shape[2:]).to(tokens.dtype).to(tokens.device)
        for i, count in enumerate(right):
            rows[i * width : i * width + count] = tokens[self.done[i] : self.done[i] + count, i]
        return strided(rows)


PROJECTED = ("qkv", "a", "b")


def verified(kernels: Kernels, layers: Layers, heads: Any, width: int, steps: int, seed: int = 0):
    """The largest difference that decoding with drafts makes to outputs and, once flushed, to
    states; NaN if anything is left unwritten."""
    plain, wide = layers.copy(), layers.copy()
    num_seqs = int((layers.cases[0]["state_indices"] >= 0).sum())
    length = steps * width
    tokens = [
        {
            name: randn(
                length, num_seqs, *case[name].shape[1:], dtype=case[name].dtype,
                device=case[name].device,
            )
            for name in PROJECTED
        }
        for case in layers.cases
    ]  # fmt: skip
    stack = rings(wide, heads, num_seqs, width)
    verifier = Verifier(stack, num_seqs, SLOTS + 1, seed)
    found = {}
    for step in range(steps):
        now = 1 if step % 4 == 3 else width
        for layer, i, token, out in verifier.step(kernels, wide, tokens, now):
            found[layer, i, token] = out
    assert all(len(accepted) > 1 for accepted in verifier.accepted)
    entries = [[i, int(layers.cases[0]["state_indices"][i])] for i in range(num_seqs)]
    kernels.gdn_commit(stack, torch.tensor(entries, dtype=torch.int32, device=stack.keys.device))
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer, case in enumerate(plain.cases):
        for i, done in enumerate(verifier.done):
            for token in range(done):
                given = {name: tokens[layer][name][token, i : i + 1] for name in PROJECTED}
                out = torch.full_like(case["out"][:1], float("nan"))
                index = case["state_indices"][i : i + 1]
                kernels.gdn_decode(GdnDecode(**case | given | dict(out=out, state_indices=index)))
                pairs.append((out[0], found[layer, i, token]))
    pairs += zip(wide.states(), plain.states(), strict=True)
    # Python's max would pass over NaN.
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


@pytest.fixture(params=["naive", "triton", "cpu"])
def any_kernels(request, device) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("C++ kernels read host memory")
    return {"naive": NaiveKernels, "triton": CudaKernels, "cpu": CpuKernels}[request.param]()


def rounding(kernels: Kernels) -> float:
    """Torch adds up several tokens in another order than one; the other kernels never do."""
    return 1e-6 if isinstance(kernels, NaiveKernels) else 0.0


@pytest.mark.parametrize("width", [4, *nightly(2, 8)])
def test_rejected_drafts_leave_nothing(any_kernels, width, device):
    layers = two_layers(2, SMALL, torch.float32, device)
    assert verified(any_kernels, layers, SMALL, width, 6, seed=width) <= rounding(any_kernels)


def test_drafts_over_a_rounded_state(any_kernels, device):
    layers = two_layers(2, (1, 2, 16, 6), torch.float32, device, state_dtype=torch.float16)
    found = verified(any_kernels, layers, (1, 2, 16, 6), 3, 6)
    assert found <= max(rounding(any_kernels), 2e-3 * isinstance(any_kernels, NaiveKernels))


def test_cpu_journals_over_a_random_schedule():
    layers = two_layers(3, (1, 2, 20, 7), torch.float32, "cpu", padding=1)
    assert both_ways(CpuKernels(), layers, (1, 2, 20, 7), STEPS, SEED)


@pytest.mark.parametrize("name", ["pending", "taken", "first"])
def test_a_wrong_count_is_noticed(name, monkeypatch):
    """The comparison sees one token too many or too few in the state or the convolution."""
    step = Verifier.step

    def shifted(self: Verifier, *args: Any) -> Any:
        found = step(self, *args)
        counts = getattr(self.stack, name)
        counts[0] = max(int(counts[0]) - 1, 0) if counts[0] else 1
        return found

    monkeypatch.setattr(Verifier, "step", shifted)
    layers = two_layers(2, SMALL, torch.float32, "cpu")
    assert not verified(NaiveKernels(), layers, SMALL, 4, steps=6) <= 1e-3


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
