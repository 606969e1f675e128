# SPDX-License-Identifier: Apache-2.0
"""Decodes of many more rows than there are states, as graphs are captured: rows without a state
read and write nothing, neither in the pool nor beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import test_kda, test_mamba1, test_mamba2
from tests.kernels.cases import conv_case, error_ratio, gdn_decode_case, run
from tests.kernels.test_mamba2 import kernels as kernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels

pytestmark = pytest.mark.slow

#: rows of a step, and those that have one of the three states of the pool
ROWS, USED = 64, 2
BESIDE = 7.0


@dataclass
class Pool:
    """States, and a block on each side of them that is not theirs."""

    around: Tensor

    @classmethod
    def of(cls, states: Tensor) -> Pool:
        """With the first three of `states [blocks, ...]`, among them those that are used."""
        around = states.new_full((5, *states.shape[1:]), BESIDE)
        around[1:4] = states[:3]
        return cls(around)

    @property
    def states(self) -> Tensor:
        return self.around[1:4]

    def check(self, expected: Tensor) -> None:
        """`expected`: the states, NaN where there are none."""
        assert (self.around[[0, 4]] == BESIDE).all()
        assert torch.equal(self.states.isnan(), expected.isnan())
        assert error_ratio(self.states, expected) < 5e-6


def padded(x: Tensor) -> Tensor:
    """Rows behind those of `x`, which hold NaN."""
    return torch.cat([x, x.new_full((ROWS - len(x), *x.shape[1:]), torch.nan)])


def indices(used: Tensor) -> Tensor:
    return torch.cat([used, used.new_full((ROWS - len(used),), -1)])


def convolution(kernels: Kernels, device: str) -> None:
    """Of ragged sequences; those that are padding have a token each."""
    case = conv_case([3, 1], [True, False], 20, torch.float32, device, padding=ROWS - USED)
    case["query_start_loc"] = torch.tensor([0, *range(3, ROWS + 3)], device=device).int()
    pool = Pool.of(case["conv_state"])
    exact = case | {name: case[name].double() for name in ("x", "weight", "conv_state", "out")}
    NaiveKernels().causal_conv1d(**exact)
    kernels.causal_conv1d(**case | {"conv_state": pool.states})
    pool.check(exact["conv_state"][:3])
    assert case["out"][4:].isnan().all()


def gated_delta_rule(kernels: Kernels, device: str) -> None:
    case = gdn_decode_case(USED, (1, 2, 16, 24), torch.float32, device, padding=ROWS - USED)
    for name in ("qkv", "a", "b"):
        case[name][USED:] = torch.nan
    pools = {name: Pool.of(case[name]) for name in ("conv_state", "ssm_state")}
    names = [name for name, value in case.items() if isinstance(value, Tensor)]
    exact = case | {name: case[name].double() for name in names if case[name].is_floating_point()}
    run(NaiveKernels(), "gdn_decode", exact)
    run(kernels, "gdn_decode", case | {name: pool.states for name, pool in pools.items()})
    for name, pool in pools.items():
        pool.check(exact[name][:3])
    assert error_ratio(case["out"][:USED], exact["out"][:USED]) < 5e-6


def decoder(made: Callable[..., Any], size: Any, kernels: Kernels, device: str) -> None:
    """With the tests' decoder of one layer."""
    one = made(kernels, USED, size, device)
    pools = {name: Pool.of(getattr(one, name)) for name in ("conv_state", "state")}
    exact = one.copy()
    exact.kernels = NaiveKernels()
    for name, pool in pools.items():
        setattr(one, name, pool.states)
    tokens = [x[0] for x in one.tokens(1)]
    out = one.decode([padded(x) for x in tokens], indices(one.indices))
    expected = exact.decode(tokens, one.indices)
    assert error_ratio(out[:USED], expected.double()) < 5e-6
    for name, pool in pools.items():
        pool.check(getattr(exact, name)[:3].double())


LAYERS: dict[str, Callable[[Kernels, str], None]] = {
    "convolution": convolution,
    "gdn": gated_delta_rule,
    "kda": partial(decoder, test_kda.Decoder, test_kda.SIZES[0]),
    "mamba1": partial(decoder, test_mamba1.Decoder, test_mamba1.SIZES[0]),
    "mamba2": partial(decoder, test_mamba2.Decoder, test_mamba2.SIZES[0]),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_without_a_state_write_nothing(layer: str, kernels: Kernels, device: str) -> None:
    LAYERS[layer](kernels, device)
