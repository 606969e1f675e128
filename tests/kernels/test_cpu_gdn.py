# SPDX-License-Identifier: Apache-2.0
"""The CPU convolution and gated delta rule against fp64, and splits against the whole."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import (
    Case,
    check,
    conv_case,
    error_ratio,
    gdn_case,
    gdn_decode_case,
    run,
)
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnDecode, GdnPrefill
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import cut_segments

KERNELS = CpuKernels()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
DTYPES = list(TOLERANCE)
#: large ones have one key head: their references take the time, in each instruction set
HEADS = [(2, 4, 12, 24), (2, 2, 16, 16), (1, 3, 96, 192), (1, 2, 128, 128), (1, 1, 256, 20)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [20, 64, 200])
@pytest.mark.parametrize("width, bias", [(2, True), (3, False), (4, False), (4, True), (5, False)])
def test_causal_conv1d_matches_fp64(
    dtype: torch.dtype, channels: int, width: int, bias: bool
) -> None:
    lengths, carried = [1, 2, 3, 70, 1, 2], [True, True, False, True, False, False]
    case = conv_case(lengths, carried, channels, dtype, "cpu", width=width, bias=bias, padding=2)
    check(KERNELS, "causal_conv1d", case, TOLERANCE[dtype])


def test_causal_conv1d_in_parallel_and_in_pieces_has_the_same_bits() -> None:
    case = conv_case([300], [False], 200, torch.float32, "cpu")
    KERNELS.causal_conv1d(**case)
    pieces = case | dict(
        conv_state=torch.full_like(case["conv_state"], float("nan")),
        out=torch.full_like(case["out"], float("nan")),
    )
    cuts = [0, 1, 2, 5, 69, 300]
    for begin, end in pairwise(cuts):
        KERNELS.causal_conv1d(
            **pieces
            | dict(
                x=case["x"][begin:end],
                out=pieces["out"][begin:end],
                has_initial_state=torch.tensor([begin > 0]),
                query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            )
        )
    index = int(case["state_indices"][0])
    assert torch.equal(pieces["out"], case["out"])
    assert torch.equal(pieces["conv_state"][index], case["conv_state"][index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_gdn_prefill_matches_fp64(dtype: torch.dtype, heads: tuple[int, int, int, int]) -> None:
    lengths, carried = [1, 15, 16, 63, 64, 65, 130], [True, False, True, False, True, True, False]
    case = gdn_case(lengths, carried, heads, dtype, "cpu", padding=1)
    check(KERNELS, "gdn_prefill", case, TOLERANCE[dtype])


@pytest.mark.parametrize("slow_decay", [False, True])
def test_gdn_prefill_with_bf16_state(slow_decay: bool) -> None:
    case = gdn_case(
        [90, 7],
        [True, False],
        (2, 4, 32, 32),
        torch.bfloat16,
        "cpu",
        state_dtype=torch.bfloat16,
        slow_decay=slow_decay,
    )
    check(KERNELS, "gdn_prefill", case, TOLERANCE[torch.bfloat16])


def test_gdn_prefill_keeps_long_memory() -> None:
    case = gdn_case([2000], [True], (1, 2, 16, 16), torch.float32, "cpu", slow_decay=True)
    check(KERNELS, "gdn_prefill", case, 5e-6)


def test_gdn_prefill_survives_extreme_decay() -> None:
    case = gdn_case([130], [True], (1, 2, 16, 16), torch.float32, "cpu")
    case["A_log"] = torch.tensor([6.0, -20.0])
    check(KERNELS, "gdn_prefill", case, TOLERANCE[torch.float32])


def in_pieces(case: Case, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Output and final state of the one sequence of `case`, prefilled cut by cut."""
    state = torch.full_like(case["ssm_state"], float("nan"))
    out = torch.full_like(case["out"], float("nan"))
    for begin, end in pairwise(cuts):
        part = slice(begin, end)
        KERNELS.gdn_prefill(
            GdnPrefill(
                **case
                | dict(
                    qkv=case["qkv"][part],
                    a=case["a"][part],
                    b=case["b"][part],
                    out=out[part],
                    ssm_state=state,
                    has_initial_state=torch.tensor([begin > 0]),
                    query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
                )
            )
        )
    return out, state[int(case["state_indices"][0])]


@pytest.mark.parametrize("cut", [1, 15, 16, 63, 64, 65, 128])
def test_gdn_prefill_in_pieces_equals_whole(cut: int) -> None:
    case = gdn_case([150], [False], (2, 4, 32, 24), torch.float32, "cpu")
    whole, whole_state = in_pieces(case, [0, 150])
    split, split_state = in_pieces(case, [0, cut, 150])
    if cut % 64 == 0:
        assert torch.equal(split, whole) and torch.equal(split_state, whole_state)
    assert error_ratio(split, whole.double()) < 1e-6
    assert error_ratio(split_state, whole_state.double()) < 1e-6


def test_gdn_prefill_neighbours_do_not_change_bits() -> None:
    lengths = [70, 3, 64]
    case = gdn_case(lengths, [False] * 3, (2, 4, 32, 24), torch.float32, "cpu")
    KERNELS.gdn_prefill(GdnPrefill(**case))
    starts = case["query_start_loc"].tolist()
    for seq in range(3):
        part = slice(starts[seq], starts[seq + 1])
        alone = {name: case[name][part] for name in ("qkv", "a", "b", "out")}
        indices = case["state_indices"][seq : seq + 1]
        out, state = in_pieces(case | alone | dict(state_indices=indices), [0, lengths[seq]])
        assert torch.equal(out, case["out"][part])
        assert torch.equal(state, case["ssm_state"][int(indices[0])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width, bias", [(4, False), (3, True)])
def test_gdn_decode_matches_fp64(
    dtype: torch.dtype, heads: tuple[int, int, int, int], width: int, bias: bool
) -> None:
    case = gdn_decode_case(5, heads, dtype, "cpu", width=width, bias=bias, padding=2)
    # In 16 bits the convolution's result is rounded before the recurrence.
    check(KERNELS, "gdn_decode", case, 2 * TOLERANCE[dtype])


def test_padding_sequences_with_tokens_touch_no_state() -> None:
    case = gdn_case([5, 7], [True, True], (2, 4, 16, 16), torch.float32, "cpu")
    conv = conv_case([5, 7], [True, True], 40, torch.float32, "cpu")
    case["ssm_state"].fill_(0.5)
    conv["conv_state"].fill_(0.5)
    for op, of_op, state in (
        ("gdn_prefill", case, "ssm_state"),
        ("causal_conv1d", conv, "conv_state"),
    ):
        of_op["state_indices"][1] = -1
        pool, index = of_op[state], 1 + int(of_op["state_indices"][0])
        before = pool.clone()
        run(KERNELS, op, of_op | {state: pool[1:]})  # block -1 of the slice is block 0 of the pool
        assert not torch.equal(before[index], pool[index])
        before[index] = pool[index]
        assert torch.equal(before.nan_to_num(), pool.nan_to_num())


def test_gdn_decode_rounds_the_convolution_like_prefill() -> None:
    case = gdn_decode_case(8, (2, 4, 64, 64), torch.bfloat16, "cpu")
    out, conv, state = (case[name].clone() for name in ("out", "conv_state", "ssm_state"))
    KERNELS.gdn_decode(GdnDecode(**case))
    NaiveKernels().gdn_decode(GdnDecode(**case | dict(out=out, conv_state=conv, ssm_state=state)))
    assert (out != case["out"]).float().mean() < 1e-2
    pool = case["ssm_state"].nan_to_num()
    assert error_ratio(pool, state.nan_to_num().double()) < 2e-4


def test_gdn_decode_with_bf16_state() -> None:
    case = gdn_decode_case(3, (2, 4, 32, 30), torch.bfloat16, "cpu", state_dtype=torch.bfloat16)
    check(KERNELS, "gdn_decode", case, 1e-2)


def test_gdn_decode_continues_prefill() -> None:
    """Token by token from an empty state equals one prefill."""
    heads, tokens = (2, 4, 32, 24), 70
    case = gdn_case([tokens], [False], heads, torch.float32, "cpu")
    conv = conv_case([tokens], [False], case["qkv"].shape[1], torch.float32, "cpu")
    raw = conv["x"]
    KERNELS.causal_conv1d(**conv)
    whole, state = in_pieces(case | dict(qkv=conv["out"]), [0, tokens])
    index = case["state_indices"]
    conv_state = torch.zeros_like(conv["conv_state"])
    ssm_state = torch.zeros_like(case["ssm_state"])
    out = torch.empty(tokens, 4, 24)
    for t in range(tokens):
        one = slice(t, t + 1)
        step = GdnDecode(
            raw[one],
            case["a"][one],
            case["b"][one],
            case["A_log"],
            case["dt_bias"],
            ssm_state,
            index,
            conv["weight"],
            None,
            conv_state,
            out[one],
        )
        KERNELS.gdn_decode(step)
    assert error_ratio(out, whole.double()) < 1e-6
    assert error_ratio(ssm_state[int(index[0])], state.double()) < 1e-6
    assert torch.equal(conv_state[int(index[0])], raw[-3:])


def test_gdn_decode_neighbours_do_not_change_bits() -> None:
    case = gdn_decode_case(6, (2, 4, 32, 30), torch.float32, "cpu")
    state, conv = case["ssm_state"].clone(), case["conv_state"].clone()
    KERNELS.gdn_decode(GdnDecode(**case))
    for seq in range(6):
        one = slice(seq, seq + 1)
        alone = case | {name: case[name][one] for name in ("qkv", "a", "b", "state_indices")}
        out = torch.empty_like(case["out"][one])
        KERNELS.gdn_decode(
            GdnDecode(**alone | dict(ssm_state=state.clone(), conv_state=conv.clone(), out=out))
        )
        assert torch.equal(out, case["out"][one])


def test_wrong_arguments_are_named() -> None:
    case = gdn_case([3], [False], (2, 4, 16, 16), torch.float32, "cpu")
    wrong = {
        "num_v_heads must be a multiple": dict(ssm_state=case["ssm_state"][:, :3]),
        "qkv must have shape": dict(qkv=torch.zeros(3, 129)),
        "has_initial_state must be bool": dict(has_initial_state=torch.tensor([1])),
        r"query_start_loc must have shape \[2\]": dict(
            query_start_loc=torch.zeros(3, dtype=torch.int32)
        ),
        "ssm_state must be dense": dict(ssm_state=case["ssm_state"].transpose(2, 3)),
    }
    for message, changed in wrong.items():
        with pytest.raises(RuntimeError, match=f"gdn_prefill.*{message}"):
            KERNELS.gdn_prefill(GdnPrefill(**case | changed))
    conv = conv_case([3], [False], 8, torch.float32, "cpu", width=6)
    with pytest.raises(RuntimeError, match="causal_conv1d: weight must have 2 to 5 taps"):
        KERNELS.causal_conv1d(**conv)


def test_gdn_prefill_takes_no_segments() -> None:
    case = gdn_case([130], [False], (1, 1, 8, 8), torch.float32, "cpu")
    segments = cut_segments([0, 130], [2], torch.device("cpu"))
    with pytest.raises(ValueError, match="give no segments"):
        KERNELS.gdn_prefill(GdnPrefill(**case, segments=segments))
