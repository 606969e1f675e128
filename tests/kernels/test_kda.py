# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: kernels against the fp64 reference, and journals of any width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

from tests.kernels.cases import arena_cache, error_ratio, ragged, randn, strided, widen
from tests.kernels.drafts import DraftedDecoder, difference, shift_a_count
from tests.nightly import nightly
from vllm.kernels.chunks import chunk_metadata
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import JournalShape, JournalStack
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode, KdaGates, KdaPrefill

pytestmark = pytest.mark.slow

SIZES = [(2, 16, 24), (1, 12, 8)]


def gates(tokens: int, size: tuple[int, int, int], dtype: torch.dtype, device: str) -> KdaGates:
    heads, dk, _ = size
    return KdaGates(
        strided(randn(tokens, heads * dk, dtype=dtype, device=device)).unflatten(1, (heads, dk)),
        strided(randn(tokens, heads, dtype=dtype, device=device)),
        torch.empty(heads).uniform_(-3, 0.5).to(device),
        torch.empty(heads, dk).uniform_(-1, 1).to(device),
    )


def pool(blocks: list[int], count: int, *inner: int, dtype: torch.dtype, device: str) -> Tensor:
    """A pool of NaN in which some blocks have values."""
    cache = arena_cache(count, *inner, dtype=dtype, device=device)
    for index in blocks:
        cache[index] = randn(*inner, dtype=dtype, device=device, scale=0.3)
    return cache


def prefill(
    lengths: list[int], carried: list[bool], size: tuple[int, int, int], device: str,
    dtype: torch.dtype = torch.float32, padding: int = 0,
) -> KdaPrefill:  # fmt: skip
    heads, dk, dv = size
    batch, count = ragged(lengths, carried, device, padding)
    tokens = sum(lengths) + padding
    indices = batch["state_indices"].tolist()
    blocks = [index for index, carry in zip(indices, carried, strict=False) if carry]
    chunk_indices, chunk_offsets = chunk_metadata(batch["query_start_loc"].tolist())
    return KdaPrefill(
        qkv=strided(randn(tokens, heads * (2 * dk + dv), dtype=dtype, device=device)),
        gates=gates(tokens, size, dtype, device),
        state=pool(blocks, count, heads, dv, dk, dtype=torch.float32, device=device),
        chunk_indices=chunk_indices.to(device),
        chunk_offsets=chunk_offsets.to(device),
        out=torch.full((tokens, heads, dv), torch.nan, dtype=dtype, device=device),
        **batch,
    )


def wide(problem: KdaPrefill) -> KdaPrefill:
    fields = {name: widen(value) for name, value in vars(problem).items()}
    fields["gates"] = KdaGates(**{name: widen(v) for name, v in vars(problem.gates).items()})
    return KdaPrefill(**fields)


@pytest.fixture(params=["naive", "triton", "cpu"])
def kernels(request, device) -> Kernels:
    if request.param == "cpu" and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    return {"naive": NaiveKernels, "triton": CudaKernels, "cpu": CpuKernels}[request.param]()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("lengths", "carried"), [([5, 70, 1], [False, True, True]), ([130, 0], [True, False])]
)
def test_prefills_agree_with_fp64(kernels, size, lengths, carried, device):
    problem = prefill(lengths, carried, size, device, padding=1)
    exact = wide(problem)
    kernels.kda_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    used = sum(lengths)
    assert error_ratio(problem.out[:used], exact.out[:used]) < 5e-6
    assert error_ratio(problem.state, exact.state) < 5e-6
    assert torch.equal(problem.state.isnan(), exact.state.isnan())


def sixteen_bits(device: str) -> torch.dtype:
    """The interpreter's bf16 products are wrong."""
    return torch.float16 if device == "cpu" else torch.bfloat16


def test_prefills_in_sixteen_bits(device):
    problem = prefill([70], [False], SIZES[0], device, sixteen_bits(device))
    exact = wide(problem)
    CudaKernels().kda_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    assert error_ratio(problem.out, exact.out) < 7e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", [0.0, 6.0, 25.0])
def test_the_cpu_in_sixteen_bits(dtype, by):
    """At a model's dims; its sums are fp32 whatever the inputs are, and no exponent is positive."""
    problem = strengthen(prefill([70, 3], [True, False], (2, 128, 128), "cpu", dtype), by)
    exact = wide(problem)
    CpuKernels().kda_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    assert error_ratio(problem.out, exact.out) < (4e-3 if dtype == torch.bfloat16 else 5e-4)
    assert error_ratio(problem.state, exact.state) < 5e-6


@pytest.mark.parametrize("cut", [1, 31, 70])
def test_the_cpu_gives_pieces_of_any_length_the_same_bits(cut):
    whole = prefill([100], [True], SIZES[1], "cpu")
    state = whole.state.clone()
    CpuKernels().kda_prefill(whole)
    gates, out, carried = whole.gates, torch.full_like(whole.out, torch.nan), torch.tensor([True])
    for part in (slice(0, cut), slice(cut, 100)):
        starts = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        piece = replace(
            whole, qkv=whole.qkv[part], out=out[part], state=state, has_initial_state=carried,
            gates=replace(gates, a=gates.a[part], b=gates.b[part]), query_start_loc=starts,
        )  # fmt: skip
        CpuKernels().kda_prefill(piece)
    assert torch.equal(out, whole.out)
    index = int(whole.state_indices[0])
    assert torch.equal(state[index], whole.state[index])


def strengthen(problem: KdaPrefill, by: float) -> KdaPrefill:
    """Every other channel forgets faster, by up to `1.6 by` per token, and some tokens not."""
    a = problem.gates.a
    problem.gates.A_log.fill_(0.5)
    a[:, :, ::2] += by * (torch.rand_like(a[:, :, ::2].float()) > 0.3)
    return problem


# About 10 and 40 per token: over eight tokens, what fp32 has an exponent for and what it has not.
@pytest.mark.parametrize("by", [6.0, 25.0])
@pytest.mark.parametrize("half", [False, True])
def test_strong_decays(by, half, device):
    dtype = sixteen_bits(device) if half else torch.float32
    problem = strengthen(prefill([100, 7], [True, False], SIZES[0], device, dtype), by)
    exact = wide(problem)
    CudaKernels().kda_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    assert error_ratio(problem.out, exact.out) < (7e-3 if half else 2e-5)
    assert error_ratio(problem.state, exact.state) < (7e-3 if half else 2e-5)


def test_a_prompt_in_pieces_of_whole_chunks_has_the_same_bits(device):
    whole = prefill([150], [False], SIZES[1], device)
    pieces = []
    for part, carried in ((slice(0, 128), False), (slice(128, 150), True)):
        piece = prefill([part.stop - part.start], [carried], SIZES[1], device)
        gates = whole.gates
        pieces.append(replace(
            piece, qkv=whole.qkv[part], out=whole.out[part].clone(),
            gates=replace(gates, a=gates.a[part], b=gates.b[part]),
            state=pieces[0].state if pieces else piece.state,
            state_indices=pieces[0].state_indices if pieces else piece.state_indices,
        ))  # fmt: skip
    for problem in (whole, *pieces):
        CudaKernels().kda_prefill(problem)
    assert torch.equal(torch.cat([piece.out for piece in pieces]), whole.out)
    states = [p.state[int(p.state_indices[0])] for p in (whole, pieces[1])]
    assert torch.equal(*states)


def test_the_reference_is_that_of_transformers():
    problem = prefill([11], [True], SIZES[0], "cpu")
    heads, dk, dv = SIZES[0]
    g = problem.gates
    decay = -g.A_log.exp()[:, None] * torch.nn.functional.softplus(g.a + g.dt_bias)
    q, k, v = problem.qkv.split([heads * dk, heads * dk, heads * dv], dim=-1)
    q, k, v = (x.reshape(1, 11, heads, -1) for x in (q, k, v))
    index = int(problem.state_indices[0])
    out, final = recurrent_kimi_delta_attention(
        q, k, v, decay[None], g.b.sigmoid()[None], problem.state[index].mT[None].clone(), True, True
    )
    NaiveKernels().kda_prefill(problem)
    assert error_ratio(problem.out, out[0].double()) < 5e-6
    assert error_ratio(problem.state[index].mT, final[0].double()) < 5e-6


# ---- decodes -------------------------------------------------------------------------------------


class Decoder(DraftedDecoder):
    """One layer's sequences, which decode given tokens."""

    def __init__(
        self, kernels: Kernels, num_seqs: int, size: tuple[int, int, int], device: str, *,
        dtype: torch.dtype = torch.float32, state_dtype: torch.dtype | None = None, taps: int = 4,
    ) -> None:  # fmt: skip
        heads, dk, dv = size
        self.kernels, self.size, self.channels = kernels, size, heads * (2 * dk + dv)
        self.dtype, self.device, self.num_seqs = dtype, device, num_seqs
        blocks = torch.randperm(num_seqs + 1)[:num_seqs]
        self.indices = blocks.to(torch.int32).to(device)
        count, made = num_seqs + 2, dict(dtype=dtype, device=device)
        self.conv_state = pool(blocks.tolist(), count, taps - 1, self.channels, **made)
        made["dtype"] = state_dtype or torch.promote_types(dtype, torch.float32)
        self.state = pool(blocks.tolist(), count, heads, dv, dk, **made)
        self.weight = randn(self.channels, taps, dtype=dtype, device=device)
        self.gates = gates(1, size, dtype, device)

    def copy(self, kernels: Kernels | None = None, widened: bool = False) -> Decoder:
        """The same with states of its own."""
        other = object.__new__(Decoder)
        vars(other).update(vars(self))
        for name in ("conv_state", "state", "weight"):
            value = getattr(self, name)
            setattr(other, name, widen(value) if widened else value.clone())
        other.kernels = kernels or self.kernels
        return other

    def tokens(self, count: int) -> list[Tensor]:
        """Projections of tokens of every sequence: `[tokens, sequences, ...]` each."""
        heads, dk, _ = self.size
        shapes = (self.channels,), (heads, dk), (heads,)
        made = dict(dtype=self.dtype, device=self.device)
        return [randn(count, self.num_seqs, *shape, **made) for shape in shapes]

    def decode(
        self, tokens: list[Tensor], indices: Tensor, stack: JournalStack | None = None
    ) -> Tensor:
        """Outputs of `qkv, a, b [rows, ...]`."""
        qkv, a, b = (strided(x.flatten(1)).unflatten(1, x.shape[1:]) for x in tokens)
        heads, _, dv = self.size
        problem = KdaDecode(
            qkv,
            replace(self.gates, a=a, b=b),
            self.weight,
            self.conv_state,
            self.state,
            indices,
            qkv.new_full((len(qkv), heads, dv), torch.nan),
            None if stack is None else stack.layer(0),
        )
        self.kernels.kda_decode(problem)
        return problem.out

    def commit(self, stack: JournalStack, entries: Tensor) -> None:
        self.kernels.kda_commit(stack, entries)

    def journal_shape(self) -> JournalShape:
        heads, dk, dv = self.size
        return JournalShape(
            heads, heads, dk, dv, self.state.dtype, self.channels, self.conv_state.dtype, True
        )


def rounding(kernels: Kernels) -> float:
    """Torch adds up several tokens in another order than one; our kernels never do."""
    return 0.0 if isinstance(kernels, CudaKernels | CpuKernels) else 1e-6


@pytest.mark.parametrize("width", [4, *nightly(1, 2, 8)])
def test_rejected_drafts_leave_nothing(kernels, width, device):
    decoder = Decoder(kernels, 2, SIZES[0], device)
    assert difference(decoder, width) <= rounding(kernels)


@pytest.mark.parametrize("taps", [2, 3])
def test_convolutions(kernels, taps, device):
    decoder = Decoder(kernels, 2, SIZES[1], device, taps=taps)
    assert difference(decoder, 3) <= rounding(kernels)


@pytest.mark.parametrize("compiled", [CudaKernels, CpuKernels])
def test_a_rounded_state(compiled, device):
    if compiled is CpuKernels and device != "cpu":
        pytest.skip("the CPU's kernels read host memory")
    decoder = Decoder(compiled(), 2, SIZES[1], device, state_dtype=torch.float16)
    assert difference(decoder, 3) == 0.0


def test_decodes_of_the_cpu_in_sixteen_bits():
    decoder = Decoder(CpuKernels(), 3, (2, 128, 128), "cpu", dtype=torch.bfloat16)
    exact = decoder.copy(NaiveKernels(), widened=True)
    for _ in range(4):
        tokens = [x[0] for x in decoder.tokens(1)]
        out = decoder.decode(tokens, decoder.indices)
        expected = exact.decode([x.double() for x in tokens], decoder.indices)
        assert error_ratio(out, expected) < 7e-3
    assert difference(decoder, 4) == 0.0


@pytest.mark.parametrize("size", SIZES)
def test_decodes_agree_with_fp64(kernels, size, device):
    decoder = Decoder(kernels, 3, size, device)
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


@pytest.mark.parametrize("name", ["pending", "taken", "first"])
def test_a_wrong_count_is_noticed(name, monkeypatch):
    shift_a_count(monkeypatch, Decoder, name)
    found = difference(Decoder(NaiveKernels(), 2, SIZES[0], "cpu"), 4, length=17)
    assert not found <= 1e-3


def test_drafts_need_a_journal():
    decoder = Decoder(NaiveKernels(), 1, SIZES[0], "cpu")
    with pytest.raises(ValueError, match="2 tokens per sequence needs a journal"):
        decoder.decode([x[:, 0] for x in decoder.tokens(2)], decoder.indices)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 4])
def test_compiled_at_the_models_size(width):
    """In bf16, bit by bit with drafts, and against the reference."""
    decoder = Decoder(CudaKernels(), 3, (32, 128, 128), "cuda", dtype=torch.bfloat16)
    assert difference(decoder, width) == 0.0
    problem = prefill([70, 3], [False, True], (32, 128, 128), "cuda", torch.bfloat16)
    exact = wide(problem)
    CudaKernels().kda_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    assert error_ratio(problem.out, exact.out) < 7e-3
