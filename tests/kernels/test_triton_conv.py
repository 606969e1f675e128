# SPDX-License-Identifier: Apache-2.0
"""Triton causal conv1d against the fp64 reference."""

import pytest
import torch

from tests.kernels.cases import TOLERANCE, check, conv_case, error_ratio, over_dtypes
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.norm.naive import normalise
from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)

pytestmark = pytest.mark.slow

kernels = CudaKernels()


@pytest.mark.parametrize(
    ("weight", "channels", "dtype"),
    over_dtypes([(4, False), (4, True), (3, False), (2, True)], [20, 300]),
    indirect=["dtype"],
)
def test_ragged_prefill(weight, channels, dtype, device):
    width, bias = weight
    case = conv_case(
        [1, 2, 40, 0, 16, 33], [True, False, True, True, False, True], channels, dtype, device,
        width=width, bias=bias, padding=2,
    )  # fmt: skip
    check(kernels, "causal_conv1d", case, TOLERANCE[dtype])


@pytest.mark.parametrize("split", [1, 2, 3, 16, 17])
def test_two_parts_equal_one(split, device):
    """The second part reads the state the first one left in a block that held NaN."""
    case = conv_case([40], [False], 12, torch.float32, device)
    whole = torch.empty_like(case["out"])
    kernels.causal_conv1d(**case | dict(out=whole, conv_state=case["conv_state"].clone()))
    for part, carried in ((slice(0, split), False), (slice(split, 40), True)):
        kernels.causal_conv1d(
            **case
            | dict(
                x=case["x"][part],
                out=case["out"][part],
                has_initial_state=torch.tensor([carried], device=device),
                query_start_loc=torch.tensor(
                    [0, part.stop - part.start], dtype=torch.int32, device=device
                ),
            )
        )
    assert error_ratio(case["out"], whole.double()) < 1e-7


def test_published_functions_agree_with_each_other(device):
    """A prompt through `causal_conv1d_fn` equals its tokens through `causal_conv1d_update`."""
    case = conv_case([6], [False], 24, torch.float32, device, bias=True)
    states = torch.zeros(2, 2, 3, 24, device=device)
    whole = causal_conv1d_fn(
        case["x"].T,
        case["weight"],
        case["bias"],
        states[0].mT,
        case["query_start_loc"],
        torch.tensor([1], dtype=torch.int32, device=device),
        case["has_initial_state"],
    )
    index = torch.tensor([1], dtype=torch.int32, device=device)
    for t in range(6):
        row = causal_conv1d_update(
            case["x"][t : t + 1], states[1].mT, case["weight"], case["bias"],
            conv_state_indices=index,
        )  # fmt: skip
        assert error_ratio(row[0], whole[:, t].double()) < 1e-6
    assert torch.equal(states[0], states[1])
    assert not states[:, 0].any()


def test_refusals(device):
    case = conv_case([6], [False], 8, torch.float32, device)
    args = (case["query_start_loc"], case["state_indices"], case["has_initial_state"])
    state = case["conv_state"]
    with pytest.raises(ValueError, match="tanh"):
        causal_conv1d_fn(case["x"].T, case["weight"], None, state.mT, *args, activation="tanh")
    with pytest.raises(ValueError, match="token-major"):
        channel_major = case["x"].T.contiguous()
        causal_conv1d_fn(channel_major, case["weight"], None, state.mT, *args)
    with pytest.raises(ValueError, match="width 5"):
        wide = normalise(torch.ones(8, 5, device=device), 0.0)
        kernels.causal_conv1d(**case | dict(weight=wide))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_realistic_size(device):
    case = conv_case(
        [2048, 1, 3, 700], [False, True, True, True], 8192, torch.bfloat16, device, padding=4
    )
    check(kernels, "causal_conv1d", case, TOLERANCE[torch.bfloat16])
