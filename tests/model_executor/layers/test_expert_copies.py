# SPDX-License-Identifier: Apache-2.0
"""Tokens choose among copies of experts by themselves alone, and any copy does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.model_executor.layers.test_mixture_layer import EXPERTS, HIDDEN, IDS, PLAIN, SHAPES, make
from vllm.config import EPLBConfig, ParallelConfig, VllmConfig
from vllm.config.current import set_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.moe import Routing, RoutingRule
from vllm.model_executor.layers import moe
from vllm.model_executor.layers.expert_copies import ExpertCopies
from vllm.model_executor.layers.expert_placement import COLUMNS, Placement
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import MixtureOfExperts


def ranks_of(shape: MixtureShape, size: int, num_redundant: int) -> list[MixtureOfExperts]:
    parallel = ParallelConfig(
        enable_expert_parallel=True,
        tensor_parallel_size=size,
        enable_eplb=True,
        eplb_config=EPLBConfig(num_redundant_experts=num_redundant),
    )
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        return [make(shape, rank, size) for rank in range(size)]


def routed(num_tokens: int, num_experts: int) -> tuple[Routing, Tensor]:
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts)
    weights, experts = logits.topk(2)
    return Routing(weights, experts.int()), logits


@pytest.fixture(autouse=True)
def reference_kernels() -> None:
    """Not here: a row's bits depend on no other row with the platform's own kernels alone."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A step, in which there is nobody to communicate with."""
    monkeypatch.setattr(moe, "tensor_model_parallel_all_reduce", lambda x, in_place: x)
    with set_forward_context(ForwardContext({}, {})):
        yield


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("size", "num_redundant"), [(2, 1), (2, 5), (3, 4)])
def test_ranks_add_up(shape: MixtureShape, size: int, num_redundant: int) -> None:
    x = torch.randn(9, HIDDEN)
    ranks = ranks_of(shape, size, num_redundant)
    per_rank = (EXPERTS + num_redundant) // size
    assert [len(one.experts.gate_up_proj) for one in ranks] == [per_rank] * size
    total = sum(rank(x, IDS) for rank in ranks)
    torch.testing.assert_close(total, make(shape)(x, IDS), rtol=1e-4, atol=1e-5)


def test_any_copy_gives_the_same_bits() -> None:
    """Every rank has all experts; of a token's ranks all but one add zero."""
    shape, x = replace(PLAIN, rule=RoutingRule(1, renormalize=False)), torch.randn(64, HIDDEN)
    ranks = ranks_of(shape, 2, EXPERTS)
    whole = make(shape)(x)
    first, second = (rank(x) for rank in ranks)
    assert torch.equal(first + second, whole)
    here = first.abs().sum(1) > 0
    assert 8 < int(here.sum()) < 56 and not first[~here].any() and not second[here].any()
    for rank in ranks:
        assert rank.copies is not None
        slots, columns = rank.copies.placement.slots, (COLUMNS,) * EXPERTS + (0,) * EXPERTS
        rank.copies.adopt(Placement(slots, columns, 2))
    first, second = (rank(x) for rank in ranks)
    assert torch.equal(first, whole) and not second.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_is_the_tokens_own(dtype: torch.dtype) -> None:
    """Whatever is beside it in the batch."""
    copies = ExpertCopies(8, 8, 4)
    routing, logits = routed(200, 8)
    logits = logits.to(dtype)
    chosen = copies.choose(routing, logits, 0).experts
    assert chosen.dtype == torch.int32 and chosen.shape == routing.experts.shape
    order = torch.randperm(200)[:70]
    part = Routing(routing.weights[order], routing.experts[order])
    assert torch.equal(copies.choose(part, logits[order], 0).experts, chosen[order])
    slots = torch.tensor(copies.placement.slots)
    assert torch.equal(slots[chosen.long()], routing.experts.long())
    assert torch.equal(copies.choose(routing, logits, 5).experts, chosen - 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_get_their_parts(dtype: torch.dtype) -> None:
    copies = ExpertCopies(2, 2, 2)
    address = copies.slots.data_ptr()
    copies.adopt(Placement((0, 1, 1, 0), (48, 0, 64, 16), 2))
    assert copies.slots.data_ptr() == address
    routing, logits = routed(4000, 2)
    chosen = copies.choose(routing, logits.to(dtype), 0).experts
    counts = chosen.flatten().bincount(minlength=4).tolist()
    assert counts[1] == 0 and counts[2] == 4000
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.04)


def test_the_shared_experts_slot_is_no_ranks() -> None:
    copies = ExpertCopies(4, 0, 2)
    routing = Routing(torch.ones(3, 1), torch.full((3, 1), 4, dtype=torch.int32))
    assert (copies.choose(routing, torch.randn(3, 4), 0).experts == -1).all()


@pytest.mark.parametrize(
    ("num_experts", "num_redundant", "num_ranks", "choose"),
    [(8, 3, 2, "choose 0 or that and a multiple of 2, up to 8"),
     (5, 0, 2, "choose 1 or that and a multiple of 2, up to 5"),
     (4, 6, 2, "up to 4")],
)  # fmt: skip
def test_slots_that_ranks_cannot_share_are_refused(
    num_experts: int, num_redundant: int, num_ranks: int, choose: str
) -> None:
    with pytest.raises(VLLMValidationError, match=choose):
        ExpertCopies(num_experts, num_redundant, num_ranks)
