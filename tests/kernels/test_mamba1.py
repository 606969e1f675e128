# SPDX-License-Identifier: Apache-2.0
"""Grouped Mamba: kernels against the fp64 reference, and journals of any width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import error_ratio, ragged, randn, strided, widen
from tests.kernels.drafts import DraftedDecoder, difference, shift_a_count
from tests.kernels.test_mamba2 import kernels as kernels
from tests.kernels.test_mamba2 import pool
from tests.nightly import nightly
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.journal import Journal, JournalMemory, JournalShape, JournalSize, JournalStack
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.mamba.ops.mamba1.problem import (
    Mamba1Decode,
    Mamba1Gates,
    Mamba1Prefill,
)

pytestmark = pytest.mark.slow

#: heads, groups, N
SIZES = [(4, 2, 16), (3, 1, 12), (2, 2, 8)]


def gates(tokens: int, size: tuple[int, int, int], dtype: torch.dtype, device: str) -> Mamba1Gates:
    heads, groups, n = size
    made: dict[str, Any] = dict(dtype=dtype, device=device)
    return Mamba1Gates(
        strided(randn(tokens, groups * n, **made)),
        strided(randn(tokens, heads * n, **made)),
        strided(randn(tokens, heads * n, **made)),
        torch.empty(heads * n, n).uniform_(-3, 1).to(device),
        torch.empty(heads * n).uniform_(-2, 1).to(device),
        torch.empty(heads * n).uniform_(-1, 1).to(device),
    )


def prefill(
    lengths: list[int], carried: list[bool], size: tuple[int, int, int], device: str,
    dtype: torch.dtype = torch.float32, padding: int = 0,
) -> Mamba1Prefill:  # fmt: skip
    heads, _, n = size
    batch, count = ragged(lengths, carried, device, padding)
    tokens = sum(lengths) + padding
    indices = batch["state_indices"].tolist()
    blocks = [index for index, carry in zip(indices, carried, strict=False) if carry]
    return Mamba1Prefill(
        x=strided(randn(tokens, heads * n, dtype=dtype, device=device)),
        gates=gates(tokens, size, dtype, device),
        state=pool(blocks, count, heads, n, n, dtype=torch.float32, device=device),
        out=torch.full((tokens, heads * n), torch.nan, dtype=dtype, device=device),
        **batch,
    )


def wide(problem: Any) -> Any:
    fields = {name: widen(value) for name, value in vars(problem).items()}
    fields["gates"] = Mamba1Gates(**{name: widen(v) for name, v in vars(problem.gates).items()})
    return type(problem)(**fields)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("lengths", "carried"), [([5, 1, 9], [False, True, True]), ([3, 0], [True, False])]
)
def test_prefills_agree_with_fp64(kernels, size, lengths, carried, device):
    problem = prefill(lengths, carried, size, device, padding=1)
    exact = wide(problem)
    kernels.mamba1_prefill(problem)
    NaiveKernels().mamba1_prefill(exact)
    used = sum(lengths)
    assert error_ratio(problem.out[:used], exact.out[:used]) < 5e-6
    assert error_ratio(problem.state, exact.state) < 5e-6
    assert torch.equal(problem.state.isnan(), exact.state.isnan())


@pytest.mark.parametrize("repeats_first", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_decodes_agree_with_fp64(kernels, size, repeats_first, device):
    """Several steps; a row without a state is padding, and more rows than states are no matter."""
    heads, groups, n = size
    made: dict[str, Any] = dict(dtype=torch.float32, device=device)
    channels = (heads if repeats_first else groups) * n
    problem = Mamba1Decode(
        x=strided(randn(7, channels, **made)),
        gates=gates(7, size, **made),
        conv_weight=randn(channels, 4, **made),
        conv_bias=randn(channels, **made),
        conv_state=pool([0, 2], 4, 3, channels, **made),
        state=pool([0, 2], 4, heads, n, n, **made),
        state_indices=torch.tensor([2, -1, 0, -1, -1, -1, -1], dtype=torch.int32, device=device),
        out=torch.full((7, heads * n), torch.nan, **made),
    )
    exact = wide(problem)
    for _ in range(3):
        kernels.mamba1_decode(problem)
        NaiveKernels().mamba1_decode(exact)
        assert error_ratio(problem.out[[0, 2]], exact.out[[0, 2]]) < 5e-6
    for name in ("conv_state", "state"):
        ours, theirs = getattr(problem, name), getattr(exact, name)
        assert error_ratio(ours, theirs) < 5e-6
        assert torch.equal(ours.isnan(), theirs.isnan())


def test_a_prefill_in_two_parts_is_one(kernels, device):
    whole = prefill([20], [True], SIZES[0], device)
    parts = replace(whole, state=whole.state.clone(), out=whole.out.clone())
    kernels.mamba1_prefill(whole)
    for part in (slice(0, 7), slice(7, 20)):
        count = part.stop - part.start
        cut = {name: getattr(whole.gates, name)[part] for name in ("B", "C", "dt")}
        starts = torch.tensor([0, count], dtype=torch.int32, device=device)
        given = dict(x=parts.x[part], out=parts.out[part], query_start_loc=starts)
        kernels.mamba1_prefill(replace(parts, gates=replace(parts.gates, **cut), **given))
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-6, atol=1e-6)
    assert error_ratio(parts.state, whole.state.double()) < 1e-6


# ---- drafts --------------------------------------------------------------------------------------


class Decoder(DraftedDecoder):
    """One layer's sequences, which decode given tokens."""

    def __init__(
        self, kernels: Kernels, num_seqs: int, size: tuple[int, int, int], device: str, *,
        repeats_first: bool = True, dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        heads, groups, n = size
        self.kernels, self.size, self.num_seqs = kernels, size, num_seqs
        self.dtype, self.device = dtype, device
        self.channels = (heads if repeats_first else groups) * n
        blocks = torch.randperm(num_seqs + 1)[:num_seqs]
        self.indices = blocks.to(torch.int32).to(device)
        self.made: dict[str, Any] = dict(dtype=dtype, device=device)
        held = (blocks.tolist(), num_seqs + 2)
        self.conv_state = pool(*held, 3, self.channels, **self.made)
        self.weight = randn(self.channels, 4, **self.made)
        self.bias = randn(self.channels, **self.made)
        self.state = pool(*held, heads, n, n, dtype=state_dtype, device=device)
        self.gates = gates(1, size, dtype, device)

    def copy(self) -> Decoder:
        other = object.__new__(Decoder)
        vars(other).update(vars(self))
        other.conv_state, other.state = self.conv_state.clone(), self.state.clone()
        return other

    def tokens(self, count: int) -> list[Tensor]:
        heads, groups, n = self.size
        widths = (self.channels, groups * n, heads * n, heads * n)
        return [randn(count, self.num_seqs, width, **self.made) for width in widths]

    def decode(
        self, tokens: list[Tensor], indices: Tensor, stack: JournalStack | None = None
    ) -> Tensor:
        problem = self.problem(tokens, indices, None if stack is None else stack.layer(0))
        self.kernels.mamba1_decode(problem)
        return problem.out

    def problem(
        self, tokens: list[Tensor], indices: Tensor, journal: Journal | None
    ) -> Mamba1Decode:
        x, B, C, dt = (strided(each) for each in tokens)
        heads, _, n = self.size
        return Mamba1Decode(
            x,
            replace(self.gates, B=B, C=C, dt=dt),
            self.weight,
            self.bias,
            self.conv_state,
            self.state,
            indices,
            x.new_full((len(x), heads * n), torch.nan),
            journal,
        )

    def commit(self, stack: JournalStack, entries: Tensor) -> None:
        self.kernels.mamba1_commit(stack, entries)

    def journal_shape(self) -> JournalShape:
        heads, groups, n = self.size
        dtypes = (self.state.dtype, self.channels, self.conv_state.dtype)
        return JournalShape(groups, heads, n, n, *dtypes, element_decay=True)

    def log_rates(self) -> list[Tensor]:
        return [self.gates.A_log]


def rounding(kernels: Kernels) -> float:
    """Torch adds up several tokens in another order than one; Triton's kernels never do."""
    return 0.0 if isinstance(kernels, CudaKernels) else 1e-6


@pytest.mark.parametrize("width", [2, 8, *nightly(4)])
def test_rejected_drafts_leave_nothing(kernels, width, device):
    decoder = Decoder(kernels, 2, SIZES[0], device)
    assert difference(decoder, width) <= rounding(kernels)


@pytest.mark.parametrize("size", SIZES[1:])
def test_drafts_with_a_convolution_per_group(kernels, size, device):
    decoder = Decoder(kernels, 2, size, device, repeats_first=False)
    assert difference(decoder, 3) <= rounding(kernels)


def test_drafts_and_a_rounded_state(device):
    decoder = Decoder(CudaKernels(), 2, SIZES[1], device, state_dtype=torch.float16)
    assert difference(decoder, 3) == 0.0


@pytest.mark.parametrize("name", ["pending", "taken", "first"])
def test_a_wrong_count_is_noticed(name, monkeypatch):
    shift_a_count(monkeypatch, Decoder, name)
    found = difference(Decoder(NaiveKernels(), 2, SIZES[0], "cpu"), 4, length=17)
    assert not found <= 1e-3


def test_every_layer_commits_at_its_own_rates(kernels, device):
    """Two layers in one stack, as the engine has them."""
    decoders = [Decoder(kernels, 2, SIZES[0], device) for _ in range(2)]
    for decoder in decoders:
        decoder.indices = decoders[0].indices
        decoder.state.nan_to_num_()
        decoder.conv_state.nan_to_num_()
    plain = [decoder.copy() for decoder in decoders]
    arena = torch.stack([decoder.state for decoder in decoders])
    conv = torch.stack([decoder.conv_state for decoder in decoders])
    shape, size = decoders[0].journal_shape(), JournalSize(3, 1)
    memory = JournalMemory.create(shape, 2, 2, size, device)
    zeros = [torch.zeros(2, dtype=torch.int32, device=device) for _ in "123"]
    steps = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.int32, device=device)
    rates = [decoder.gates.A_log for decoder in decoders]
    stack = memory.stack(steps, tuple(zeros), list(arena), list(conv), rates)
    for layer, decoder in enumerate(decoders):
        decoder.state, decoder.conv_state = arena[layer], conv[layer]
        token = [each[0] for each in decoder.tokens(1)]
        decoder.kernels.mamba1_decode(decoder.problem(token, decoder.indices, stack.layer(layer)))
        plain[layer].decode(token, plain[layer].indices)
    zeros[0] += 1  # each row has its token pending
    entries = [[i, int(index)] for i, index in enumerate(decoders[0].indices)]
    before = arena.clone()
    kernels.mamba1_commit(stack, torch.tensor(entries, dtype=torch.int32, device=device))
    assert not torch.equal(arena, before)
    for decoder, expected in zip(decoders, plain, strict=True):
        assert torch.equal(decoder.states()[1], expected.states()[1])


def test_drafts_need_a_journal():
    decoder = Decoder(NaiveKernels(), 1, SIZES[0], "cpu")
    with pytest.raises(ValueError, match="2 tokens per sequence needs a journal"):
        decoder.decode([x[:, 0] for x in decoder.tokens(2)], decoder.indices)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_compiled_drafts_at_the_models_size(width):
    decoder = Decoder(CudaKernels(), 3, (256, 64, 16), "cuda", dtype=torch.bfloat16)
    assert difference(decoder, width) == 0.0


@pytest.mark.gpu
def test_compiled_at_the_models_size():
    problem = prefill([70, 3], [False, True], (256, 64, 16), "cuda", torch.bfloat16)
    exact = wide(problem)
    CudaKernels().mamba1_prefill(problem)
    NaiveKernels().mamba1_prefill(exact)
    assert error_ratio(problem.out, exact.out) < 5e-3
