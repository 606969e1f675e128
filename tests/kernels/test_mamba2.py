# SPDX-License-Identifier: Apache-2.0
"""Mamba2: kernels against the fp64 reference, and journals of any width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCE, arena_cache, error_ratio, ragged, randn, strided, widen
from tests.kernels.drafts import DraftedDecoder, difference, shift_a_count
from tests.nightly import nightly
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import JournalShape, JournalStack
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.mamba.ops.mamba2.problem import (
    Mamba2Decode,
    Mamba2Gates,
    Mamba2Prefill,
    Mamba2Sizes,
)

pytestmark = pytest.mark.slow

#: heads, groups, P, N
SIZES = [Mamba2Sizes(4, 2, 16, 24), Mamba2Sizes(3, 1, 12, 16)]
NEMOTRON, GRANITE = Mamba2Sizes(16, 8, 80, 128), Mamba2Sizes(48, 1, 64, 128)
FALCON = Mamba2Sizes(24, 1, 128, 256)


def gates(tokens: int, sizes: Mamba2Sizes, dtype: torch.dtype, device: str) -> Mamba2Gates:
    heads = sizes.num_heads
    return Mamba2Gates(
        strided(randn(tokens, heads, dtype=dtype, device=device)),
        torch.empty(heads).uniform_(-3, 1).to(device),
        torch.empty(heads).uniform_(-2, 1).to(device),
        torch.empty(heads).uniform_(-1, 1).to(device),
        (0.05, 2.0),
    )


def pool(blocks: list[int], count: int, *inner: int, dtype: torch.dtype, device: str) -> Tensor:
    """A pool of NaN in which some blocks have values."""
    cache = arena_cache(count, *inner, dtype=dtype, device=device)
    for index in blocks:
        cache[index] = randn(*inner, dtype=dtype, device=device, scale=0.3)
    return cache


def prefill(
    lengths: list[int], carried: list[bool], sizes: Mamba2Sizes, device: str,
    dtype: torch.dtype = torch.float32, padding: int = 0,
) -> Mamba2Prefill:  # fmt: skip
    batch, count = ragged(lengths, carried, device, padding)
    tokens = sum(lengths) + padding
    indices = batch["state_indices"].tolist()
    blocks = [index for index, carry in zip(indices, carried, strict=False) if carry]
    state = (sizes.num_heads, sizes.head_dim, sizes.state_size)
    return Mamba2Prefill(
        x=strided(randn(tokens, sum(sizes.sections), dtype=dtype, device=device)),
        gates=gates(tokens, sizes, dtype, device),
        state=pool(blocks, count, *state, dtype=torch.float32, device=device),
        out=torch.full((tokens, *state[:2]), torch.nan, dtype=dtype, device=device),
        **batch,
    )


def wide(problem: Mamba2Prefill) -> Mamba2Prefill:
    fields = {name: widen(value) for name, value in vars(problem).items()}
    fields["gates"] = Mamba2Gates(**{name: widen(v) for name, v in vars(problem.gates).items()})
    return Mamba2Prefill(**fields)


@pytest.fixture(params=["naive", "triton", "cpu"])
def kernels(request, device) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    return {"naive": NaiveKernels, "triton": CudaKernels, "cpu": CpuKernels}[request.param]()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("lengths", "carried"),
    [([5, 1, 9], [False, True, True]), ([3, 0], [True, False]), ([130, 64], [True, False])],
)
def test_prefills_agree_with_fp64(kernels, sizes, lengths, carried, device):
    """Chunks of 64 tokens, whole and not; a sequence that starts reads no state."""
    problem = prefill(lengths, carried, sizes, device, padding=1)
    exact = wide(problem)
    kernels.mamba2_prefill(problem)
    NaiveKernels().mamba2_prefill(exact)
    used = sum(lengths)
    assert error_ratio(problem.out[:used], exact.out[:used]) < 5e-6
    assert error_ratio(problem.state, exact.state) < 5e-6
    assert torch.equal(problem.state.isnan(), exact.state.isnan())


def test_prefills_in_sixteen_bits(device, dtype):
    problem = prefill([70, 3], [False, True], SIZES[0], device, dtype)
    exact = wide(problem)
    CudaKernels().mamba2_prefill(problem)
    NaiveKernels().mamba2_prefill(exact)
    assert error_ratio(problem.out, exact.out) < 2 * TOLERANCE[dtype]


def test_a_prefill_in_two_parts_is_one(kernels, device):
    """Cut at a multiple of 64 tokens the bits are the same."""
    whole = prefill([150], [True], SIZES[0], device)
    parts = replace(whole, state=whole.state.clone(), out=whole.out.clone())
    kernels.mamba2_prefill(whole)
    for start, end in ((0, 64), (64, 150)):
        part = slice(start, end)
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        dt = parts.gates.dt[part]
        kernels.mamba2_prefill(
            replace(
                parts,
                x=parts.x[part],
                gates=replace(parts.gates, dt=dt),
                query_start_loc=starts,
                out=parts.out[part],
            )
        )
    assert torch.equal(parts.out, whole.out)
    assert torch.equal(parts.state.nan_to_num(), whole.state.nan_to_num())


# ---- decodes -------------------------------------------------------------------------------------


class Decoder(DraftedDecoder):
    """One layer's sequences, which decode given tokens."""

    def __init__(
        self, kernels: Kernels, num_seqs: int, sizes: Mamba2Sizes, device: str, *,
        dtype: torch.dtype = torch.float32, state_dtype: torch.dtype | None = None, taps: int = 4,
        bias: bool = True,
    ) -> None:  # fmt: skip
        self.kernels, self.sizes, self.channels = kernels, sizes, sum(sizes.sections)
        self.dtype, self.device, self.num_seqs = dtype, device, num_seqs
        blocks = torch.randperm(num_seqs + 1)[:num_seqs]
        self.indices = blocks.to(torch.int32).to(device)
        count, made = num_seqs + 2, dict(dtype=dtype, device=device)
        self.conv_state = pool(blocks.tolist(), count, taps - 1, self.channels, **made)
        self.weight = randn(self.channels, taps, dtype=dtype, device=device)
        self.bias = randn(self.channels, dtype=dtype, device=device) if bias else None
        made["dtype"] = state_dtype or torch.promote_types(dtype, torch.float32)
        state = (sizes.num_heads, sizes.head_dim, sizes.state_size)
        self.state = pool(blocks.tolist(), count, *state, **made)
        self.gates = gates(1, sizes, dtype, device)

    def copy(self, kernels: Kernels | None = None, widened: bool = False) -> Decoder:
        other = object.__new__(Decoder)
        vars(other).update(vars(self))
        for name in ("conv_state", "state", "weight", "bias"):
            value = getattr(self, name)
            if value is not None:
                setattr(other, name, widen(value) if widened else value.clone())
        other.kernels = kernels or self.kernels
        return other

    def tokens(self, count: int) -> list[Tensor]:
        shapes = (self.channels,), (self.sizes.num_heads,)
        made = dict(dtype=self.dtype, device=self.device)
        return [randn(count, self.num_seqs, *shape, **made) for shape in shapes]

    def decode(
        self, tokens: list[Tensor], indices: Tensor, stack: JournalStack | None = None
    ) -> Tensor:
        xbc, dt = (strided(x) for x in tokens)
        heads, dim = self.sizes.num_heads, self.sizes.head_dim
        problem = Mamba2Decode(
            xbc,
            replace(self.gates, dt=dt),
            self.weight,
            self.bias,
            self.conv_state,
            self.state,
            indices,
            xbc.new_full((len(xbc), heads, dim), torch.nan),
            None if stack is None else stack.layer(0),
        )
        self.kernels.mamba2_decode(problem)
        return problem.out

    def commit(self, stack: JournalStack, entries: Tensor) -> None:
        self.kernels.mamba2_commit(stack, entries)

    def journal_shape(self) -> JournalShape:
        sizes = self.sizes
        heads = (sizes.num_groups, sizes.num_heads, sizes.state_size, sizes.head_dim)
        return JournalShape(*heads, self.state.dtype, self.channels, self.conv_state.dtype)


def rounding(kernels: Kernels) -> float:
    """Torch adds up several tokens in another order than one; our kernels never do."""
    return 0.0 if isinstance(kernels, CudaKernels | CpuKernels) else 1e-6


@pytest.mark.parametrize("width", [4, *nightly(1, 2, 8)])
def test_rejected_drafts_leave_nothing(kernels, width, device):
    decoder = Decoder(kernels, 2, SIZES[0], device)
    assert difference(decoder, width) <= rounding(kernels)


@pytest.mark.parametrize(("taps", "bias"), [(2, True), (3, False)])
def test_convolutions(taps, bias, device):
    decoder = Decoder(CudaKernels(), 2, SIZES[1], device, taps=taps, bias=bias)
    assert difference(decoder, 3) == 0.0


def test_a_rounded_state(device):
    decoder = Decoder(CudaKernels(), 2, SIZES[1], device, state_dtype=torch.float16)
    assert difference(decoder, 3) == 0.0


@pytest.mark.parametrize("sizes", SIZES)
def test_decodes_agree_with_fp64(kernels, sizes, device):
    decoder = Decoder(kernels, 3, sizes, device)
    exact = decoder.copy(NaiveKernels(), widened=True)
    for _ in range(4):
        tokens = [x[0] for x in decoder.tokens(1)]
        indices = decoder.indices.clone()
        indices[-1] = -1
        out = decoder.decode(tokens, indices)
        expected = exact.decode([x.double() for x in tokens], indices)
        assert error_ratio(out[:-1], expected[:-1]) < 5e-6
    for state, reference in zip(decoder.states(), exact.states(), strict=True):
        assert error_ratio(state, reference) < 5e-6


@pytest.mark.gpu
def test_batch_sizes_share_a_kernel():
    """Nothing that depends on the batch is a constant of a kernel."""
    from vllm.kernels.triton import compile_log

    compile_log.install()
    decoder = Decoder(CudaKernels(), 40, SIZES[0], "cuda")
    tokens = [x[0] for x in decoder.tokens(1)]

    def compiled(count: int) -> int:
        decoder.decode([x[:count] for x in tokens], decoder.indices[:count])
        CudaKernels().mamba2_prefill(prefill([count] * count, [False] * count, SIZES[0], "cuda"))
        return len(compile_log.compilations())

    first = compiled(2)
    assert [compiled(count) for count in (3, 7, 16, 33)] == [first] * 4


@pytest.mark.parametrize("name", ["pending", "taken", "first"])
def test_a_wrong_count_is_noticed(name, monkeypatch):
    shift_a_count(monkeypatch, Decoder, name)
    found = difference(Decoder(NaiveKernels(), 2, SIZES[0], "cpu"), 4, length=17)
    assert not found <= 1e-3


def test_drafts_need_a_journal():
    decoder = Decoder(NaiveKernels(), 1, SIZES[0], "cpu")
    with pytest.raises(ValueError, match="2 tokens per sequence needs a journal"):
        decoder.decode([x[:, 0] for x in decoder.tokens(2)], decoder.indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [Mamba2Sizes(8, 2, 64, 128), Mamba2Sizes(3, 1, 10, 20)])
def test_the_cpu_in_sixteen_bits(dtype, sizes):
    """Its sums are fp32 whatever the inputs are; a row of the state may end within a vector."""
    bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
    problem = prefill([70, 3, 0], [True, False, True], sizes, "cpu", dtype)
    exact = wide(problem)
    CpuKernels().mamba2_prefill(problem)
    NaiveKernels().mamba2_prefill(exact)
    assert error_ratio(problem.out, exact.out) < bound
    assert error_ratio(problem.state, exact.state) < 5e-6
    decoder = Decoder(CpuKernels(), 3, sizes, "cpu", dtype=dtype)
    reference = decoder.copy(NaiveKernels(), widened=True)
    for _ in range(4):
        tokens = [x[0] for x in decoder.tokens(1)]
        out = decoder.decode(tokens, decoder.indices)
        expected = reference.decode([x.double() for x in tokens], decoder.indices)
        assert error_ratio(out, expected) < 2 * bound
    assert difference(decoder, 4) == 0.0


def test_the_cpu_refuses_what_does_not_fit():
    problem = prefill([5], [False], SIZES[0], "cpu")
    wrong = replace(problem, gates=replace(problem.gates, dt=problem.gates.dt[:4]))
    with pytest.raises(RuntimeError, match="mamba2_prefill: dt"):
        CpuKernels().mamba2_prefill(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [NEMOTRON, GRANITE, FALCON], ids=["nemotron", "granite", "falcon"]
)
@pytest.mark.parametrize("width", [1, 4])
def test_compiled_at_the_models_sizes(width, sizes):
    """In bf16, bit by bit with drafts, and against the reference."""
    decoder = Decoder(CudaKernels(), 3, sizes, "cuda", dtype=torch.bfloat16)
    assert difference(decoder, width) == 0.0
    problem = prefill([200, 3], [False, True], sizes, "cuda", torch.bfloat16)
    exact = wide(problem)
    CudaKernels().mamba2_prefill(problem)
    NaiveKernels().mamba2_prefill(exact)
    assert error_ratio(problem.out, exact.out) < 1e-2
    assert error_ratio(problem.state, exact.state) < 1e-2
