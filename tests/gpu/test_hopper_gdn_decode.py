# SPDX-License-Identifier: Apache-2.0
"""The decode step in CUDA C++ against fp64 and Triton, its bits, and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import journals
from tests.kernels.cases import Case, check, error_ratio, gdn_decode_case, randn, strided, widen
from tests.kernels.journals import Layers, both_ways, rings, run, two_layers, verified
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.cuda_library import HOPPER
from vllm.kernels.journal import GatedNorm, JournalMemory, JournalShape, JournalSize
from vllm.kernels.linear.skinny import OPS, skinny_linear
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule import (
    hopper_decode as hopper_decode_module,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_decode import (
    MAX_PENDING,
    MAX_TOKENS,
    claims,
    hopper_decode,
    takes_decode,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
MODEL, SHARD = (16, 32, 128, 128), (2, 8, 128, 128)
HEADS = (MODEL, SHARD, (3, 3, 128, 128))


def copied(case: Case) -> Case:
    written = ("ssm_state", "conv_state", "out")
    return case | {name: case[name].clone() for name in written}


def taken(case: Case, norm: GatedNorm | None = None) -> bool:
    return takes_decode(GdnDecode(**case, norm=norm))


def norm_of(rows: int, heads: int, dtype: torch.dtype) -> GatedNorm:
    gate = strided(randn(rows, heads * 128, dtype=BF16, device="cuda"))
    return GatedNorm(gate.unflatten(1, (-1, 128)), randn(128, dtype=dtype, device="cuda"), 1e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("state_dtype", "bias"), [(F32, True), (BF16, False)])
def test_fp64(kernels: CudaKernels, heads: Any, state_dtype: torch.dtype, bias: bool) -> None:
    """Nothing but a sequence's own blocks and row of `out` is touched; padding is left alone."""
    for num_seqs in (1, 8, 19):
        case = gdn_decode_case(
            num_seqs, heads, BF16, "cuda", state_dtype=state_dtype, bias=bias, padding=2
        )
        assert taken(case)
        check(kernels, "gdn_decode", copied(case), 5e-3)
        wide, triton, found = {k: widen(v) for k, v in case.items()}, copied(case), copied(case)
        NaiveKernels().gdn_decode(GdnDecode(**wide))
        CudaKernels().gdn_decode(GdnDecode(**triton))
        kernels.gdn_decode(GdnDecode(**found))
        for name in ("out", "ssm_state"):
            ours, theirs = (error_ratio(c[name], wide[name]) for c in (found, triton))
            assert ours < 1.02 * theirs
        assert torch.equal(found["conv_state"].nan_to_num(), triton["conv_state"].nan_to_num())
        assert found["out"][num_seqs:].isnan().all()


@pytest.mark.parametrize("num_seqs", [5, 20])
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_the_norm_is_that_of_the_separate_op(
    kernels: CudaKernels, num_seqs: int, weight_dtype: torch.dtype
) -> None:
    case = gdn_decode_case(num_seqs, MODEL, BF16, "cuda")
    plain, fused = copied(case), copied(case)
    norm = norm_of(num_seqs, 32, weight_dtype)
    kernels.gdn_decode(GdnDecode(**plain))
    kernels.gdn_decode(GdnDecode(**fused, norm=norm))
    out = plain["out"]
    exact = NaiveKernels().gated_rms_norm(
        out.double(), norm.gate.double(), norm.weight.double(), norm.eps
    )
    triton = CudaKernels().gated_rms_norm(out, norm.gate, norm.weight, norm.eps)
    ratio = error_ratio(fused["out"].flatten(1), exact)
    assert ratio < 1.02 * error_ratio(triton, exact) < 5e-3
    assert torch.equal(fused["ssm_state"].nan_to_num(), plain["ssm_state"].nan_to_num())


@pytest.mark.parametrize("num_seqs", [3, 20])
def test_gates_far_open_and_far_shut(kernels: CudaKernels, num_seqs: int) -> None:
    """Sigmoids of hundreds either way; and what is no number stays none."""
    case = gdn_decode_case(num_seqs, MODEL, BF16, "cuda")
    norm = norm_of(num_seqs, 32, BF16)
    for tensor in (case["qkv"], case["b"], norm.gate):
        tensor.mul_(200)
    wide = {k: widen(v) for k, v in case.items()}
    exact_norm = GatedNorm(norm.gate.double(), norm.weight.double(), norm.eps)
    NaiveKernels().gdn_decode(GdnDecode(**wide, norm=exact_norm))
    found, triton = copied(case), copied(case)
    kernels.gdn_decode(GdnDecode(**found, norm=norm))
    CudaKernels().gdn_decode(GdnDecode(**triton, norm=norm))
    ours, theirs = (error_ratio(c["out"], wide["out"]) for c in (found, triton))
    assert ours < 1.05 * theirs < 1e-2
    case["b"][1, 4] = float("nan")
    kernels.gdn_decode(GdnDecode(**case, norm=norm))
    lost = case["out"].isnan().all(-1)
    assert lost.nonzero().tolist() == [[1, 4]]


@pytest.mark.parametrize("num_seqs", [7, 19])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
@pytest.mark.parametrize("heads", HEADS)
def test_deferred_bits_are_immediate_bits(
    kernels: CudaKernels, num_seqs: int, heads: Any, state_dtype: torch.dtype
) -> None:
    """Over random schedules, whose flushes are the Triton kernel's."""
    layers = two_layers(num_seqs, heads, BF16, "cuda", state_dtype=state_dtype, padding=2)
    assert both_ways(kernels, layers, heads, steps=20)


def test_a_ring_agrees_with_the_reference(kernels: CudaKernels) -> None:
    layers = two_layers(4, MODEL, BF16, "cuda")
    wide = Layers([{k: widen(v) for k, v in case.items()} for case in layers.cases])
    expected = run(NaiveKernels(), wide, None, 6)
    found = run(kernels, layers, rings(layers, MODEL, rows=9), 6)
    assert error_ratio(torch.stack(found), torch.stack(expected)) < 5e-3


def test_one_key_head_of_a_ring_is_not_anothers(kernels: CudaKernels) -> None:
    """Each head replays its own tokens: a change of one entry changes that head alone."""
    case = gdn_decode_case(1, MODEL, BF16, "cuda")
    memory = JournalMemory.create(JournalShape(*MODEL, F32), 1, 1, JournalSize(3), "cuda")
    memory.errors.normal_()
    memory.keys.normal_(std=0.1)
    memory.decays.fill_(0.9)
    steps = torch.tensor([[0, 2, 0, 0]], dtype=torch.int32, device="cuda")
    counts = tuple(torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3))
    ring = memory.stack(steps, counts, [case["ssm_state"]], [case["conv_state"]]).layer(0)
    before, after = copied(case), copied(case)
    kernels.gdn_decode(GdnDecode(**before, journal=ring))
    memory.errors[0, 0, 1, 5] *= -1
    kernels.gdn_decode(GdnDecode(**after, journal=ring))
    changed = (before["out"] != after["out"]).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_bits_do_not_depend_on_the_batch(kernels: CudaKernels, state_dtype: torch.dtype) -> None:
    """One sequence of many, alone and in a few: the same bits from large tiles and small."""
    case = gdn_decode_case(70, MODEL, BF16, "cuda", state_dtype=state_dtype)
    whole = copied(case)
    kernels.gdn_decode(GdnDecode(**whole))
    for count in (1, 4, 8, 20):
        rows = slice(7, 7 + count)
        names = ("qkv", "a", "b", "state_indices", "out")
        few = copied(case)
        few |= {name: few[name][rows] for name in names}
        kernels.gdn_decode(GdnDecode(**few))
        assert torch.equal(few["out"], whole["out"][rows])
        used = case["state_indices"][rows].long()
        for name in ("ssm_state", "conv_state"):
            assert torch.equal(few[name][used], whole[name][used])


@pytest.mark.parametrize(
    ("num_seqs", "missing"),
    [(70, [0, 3, 69]), (70, [*range(50, 70)]), (400, [5, *range(390, 400)]), (40, [*range(40)])],
)
def test_rows_without_a_block_are_left_alone(
    kernels: CudaKernels, num_seqs: int, missing: list[int]
) -> None:
    """Wherever they are, also beyond one look at all rows' indices; the others' bits stay."""
    case = gdn_decode_case(num_seqs, SHARD, BF16, "cuda")
    all_rows, some = copied(case), copied(case)
    some["state_indices"] = case["state_indices"].clone()
    some["state_indices"][missing] = -1
    kernels.gdn_decode(GdnDecode(**all_rows))
    kernels.gdn_decode(GdnDecode(**some))
    kept = torch.ones(num_seqs, dtype=torch.bool, device="cuda")
    kept[missing] = False
    assert torch.equal(some["out"][kept], all_rows["out"][kept])
    assert some["out"][~kept].isnan().all()
    used, skipped = case["state_indices"][kept].long(), case["state_indices"][~kept].long()
    for name in ("ssm_state", "conv_state"):
        assert torch.equal(some[name][used], all_rows[name][used])
        assert torch.equal(some[name][skipped], case[name][skipped])
    assert not claims(case["out"].device).any()


@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_the_largest_ring_fits(
    kernels: CudaKernels, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where shared memory holds fewer items at a time: the same bits, over many items."""
    monkeypatch.setattr(journals, "SLOTS", MAX_PENDING)
    heads = (4, 16, 128, 128)
    layers = two_layers(140, heads, BF16, "cuda", state_dtype=state_dtype)
    assert both_ways(kernels, layers, heads, steps=MAX_PENDING + 3)


@pytest.mark.parametrize(
    ("heads", "num_seqs", "width", "state_dtype"),
    [
        (MODEL, 2, 4, F32),
        (MODEL, 6, 4, BF16),
        (MODEL, 10, 3, F32),
        (MODEL, 1, 8, F32),
        (SHARD, 3, 5, BF16),
        ((3, 3, 128, 128), 45, 4, F32),
    ],
)
def test_rejected_drafts_leave_nothing(
    kernels: CudaKernels, heads: Any, num_seqs: int, width: int, state_dtype: torch.dtype
) -> None:
    """Steps of several tokens and of one between them have the bits of decoding one by one,
    whether each value head has a multiprocessor, or each key head, or neither."""
    layers = two_layers(num_seqs, heads, BF16, "cuda", state_dtype=state_dtype, bias=True)
    assert verified(kernels, layers, heads, width, 6, seed=width) == 0


@pytest.mark.parametrize(("num_seqs", "state_dtype"), [(2, F32), (2, BF16), (70, F32)])
def test_the_most_drafts_fit(
    kernels: CudaKernels,
    num_seqs: int,
    state_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where shared memory holds no second item."""
    monkeypatch.setattr(journals, "SLOTS", MAX_PENDING - MAX_TOKENS + 1)
    layers = two_layers(num_seqs, SHARD, BF16, "cuda", state_dtype=state_dtype)
    assert verified(kernels, layers, SHARD, MAX_TOKENS, 6) == 0


def verification(
    num_seqs: int, tokens: int, heads: Any, most_pending: int = 5, **changes: Any
) -> Case:
    """A step of several tokens of each sequence, with a journal in which nothing is pending."""
    case = gdn_decode_case(num_seqs, heads, BF16, "cuda", **changes)
    rows = len(case["state_indices"])
    for name in ("qkv", "a", "b"):
        case[name] = strided(randn(rows * tokens, case[name].shape[1], dtype=BF16, device="cuda"))
    case["out"] = torch.full((rows * tokens, heads[1], 128), float("nan"), dtype=BF16).cuda()
    channels = case["qkv"].shape[1]
    shape = JournalShape(*heads, F32, channels=channels, input_dtype=BF16)
    memory = JournalMemory.create(shape, 1, rows, JournalSize(most_pending, tokens), "cuda")
    steps = torch.tensor([[i, 0, i % 2, 0] for i in range(rows)], dtype=torch.int32)
    counts = tuple(torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(3))
    stack = memory.stack(steps.cuda(), counts, [case["ssm_state"]], [case["conv_state"]])
    return case | dict(journal=stack.layer(0))


@pytest.mark.parametrize("num_seqs", [3, 10])
def test_the_norm_of_several_tokens(kernels: CudaKernels, num_seqs: int) -> None:
    case = verification(num_seqs, 4, MODEL)
    plain, fused = copied(case), copied(case)
    norm = norm_of(num_seqs * 4, 32, BF16)
    kernels.gdn_decode(GdnDecode(**plain))
    kernels.gdn_decode(GdnDecode(**fused, norm=norm))
    out = plain["out"]
    exact = NaiveKernels().gated_rms_norm(
        out.double(), norm.gate.double(), norm.weight.double(), norm.eps
    )
    triton = CudaKernels().gated_rms_norm(out, norm.gate, norm.weight, norm.eps)
    ratio = error_ratio(fused["out"].flatten(1), exact)
    assert ratio < 1.02 * error_ratio(triton, exact) < 5e-3


@pytest.mark.parametrize("num_seqs", [5, 80])
def test_several_tokens_of_rows_without_a_block(kernels: CudaKernels, num_seqs: int) -> None:
    """They are left alone, and so are other blocks; the others' bits stay."""
    case = verification(num_seqs, 4, SHARD, padding=2)
    assert taken(case)
    all_rows, some = copied(case), copied(case)
    some["state_indices"] = case["state_indices"].clone()
    some["state_indices"][1] = -1
    kernels.gdn_decode(GdnDecode(**all_rows))
    kernels.gdn_decode(GdnDecode(**some))
    found, expected = (c["out"].unflatten(0, (-1, 4)) for c in (some, all_rows))
    kept = some["state_indices"] >= 0
    assert found[~kept].isnan().all()
    assert torch.equal(found[kept], expected[kept])
    skipped = int(case["state_indices"][1])
    for name in ("ssm_state", "conv_state"):
        expected = all_rows[name].clone()
        expected[skipped] = case[name][skipped]
        assert torch.equal(some[name].nan_to_num(), expected.nan_to_num())


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph


@pytest.mark.parametrize(("num_seqs", "tokens"), [(1, 1), (4, 1), (16, 1), (1, 4), (4, 4)])
@pytest.mark.usefixtures("own_stream")
def test_a_replayed_chain_equals_kernels_one_after_the_other(
    kernels: CudaKernels, num_seqs: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step reads the projection of what the one before wrote, and may start before it."""
    assert OPS.choose(HOPPER)
    cases = [
        gdn_decode_case(num_seqs, MODEL, BF16, "cuda")
        if tokens == 1
        else verification(num_seqs, tokens, MODEL)
        for _ in range(6)
    ]
    cases = [case | dict(state_indices=cases[0]["state_indices"]) for case in cases]
    used = cases[0]["state_indices"].long()
    for case in cases:
        for name in ("ssm_state", "conv_state"):
            case[name] = torch.randn_like(case[name], dtype=F32).to(case[name].dtype) * 0.3
    weight = torch.randn(12352, 4096, dtype=BF16, device="cuda") / 64
    gates = norm_of(1, 32, BF16)
    x = torch.randn(num_seqs * tokens, 4096, dtype=BF16, device="cuda")

    def chain(overlap: bool) -> None:
        hidden = x
        for case in cases:
            parts = skinny_linear(hidden, weight, None, overlap)
            qkv, z, b, a = parts.split([8192, 4096, 32, 32], dim=-1)
            case |= dict(qkv=qkv, a=a, b=b)
            norm = GatedNorm(z.unflatten(1, (-1, 128)), gates.weight, 1e-6)
            kernels.gdn_decode(GdnDecode(**case, norm=norm))
            hidden = case["out"].flatten(1)

    def results() -> list[Tensor]:
        names = ("out", "ssm_state", "conv_state")
        return [case[n] if n == "out" else case[n][used] for case in cases for n in names]

    states = [case[name].clone() for case in cases for name in ("ssm_state", "conv_state")]

    def reset() -> None:
        saved = iter(states)
        for case in cases:
            case["ssm_state"].copy_(next(saved))
            case["conv_state"].copy_(next(saved))
            case["out"].fill_(float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(hopper_decode_module, "overlaps_launches", lambda device: False)
        chain(overlap=False)
    expected = [result.clone() for result in results()]
    graph = captured(lambda: chain(overlap=True))
    for _ in range(10):
        reset()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


@pytest.mark.usefixtures("kernels")
def test_what_the_kernel_cannot_read_is_refused() -> None:
    case = gdn_decode_case(2, SHARD, BF16, "cuda")

    def refused(why: str, **changes: Any) -> None:
        with pytest.raises(RuntimeError, match=why):
            hopper_decode(GdnDecode(**case | changes))

    refused("qkv must be bfloat16", qkv=case["qkv"].float())
    refused("a and b must", a=case["a"].half())
    refused("state_indices must be int32", state_indices=case["state_indices"].long())
    refused("ssm_state must be", ssm_state=case["ssm_state"].half())
    refused("conv_state must be", conv_state=case["conv_state"][:, :2])
    refused("conv_weight must be dense", conv_weight=case["conv_weight"][:, :3])
    twice = {name: case[name].repeat(2, 1) for name in ("qkv", "a", "b")}
    twice |= dict(out=case["out"].repeat(2, 1, 1))
    refused("several tokens of a sequence need a ring", **twice)
    several = verification(2, 3, SHARD)
    short = replace(several["journal"], inputs=several["journal"].inputs[:, :1].contiguous())
    refused("inputs must keep those", **several | dict(journal=short))
    refused("keys must have slots", **verification(2, 1, SHARD, most_pending=MAX_PENDING + 1))
    refused("1, 2 or 4 value heads", **gdn_decode_case(2, (1, 8, 128, 128), BF16, "cuda"))
