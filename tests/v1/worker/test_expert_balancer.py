# SPDX-License-Identifier: Apache-2.0
"""Ranks exchange experts: threads stand for processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.layers.ranks import as_rank
from vllm.config import EPLBConfig, ParallelConfig, VllmConfig
from vllm.config.current import set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.kernels.moe import ClampedSwiglu, RoutingRule
from vllm.model_executor.layers import moe
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8_config import Fp8Config
from vllm.model_executor.model_loader.base import initialize_dummy_weights
from vllm.v1.worker import expert_balancer
from vllm.v1.worker.expert_balancer import ExpertBalancer

HIDDEN, EXPERTS, RANKS, REDUNDANT = 128, 8, 4, 4
PLAIN = MixtureShape(HIDDEN, 16, EXPERTS, RoutingRule(2))
BIASED = replace(PLAIN, expert_biases=True, router_bias=True, clamp=ClampedSwiglu(1.7, 7.0, 1.0))


class Wires:
    """What ranks send each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.sums: dict[int, Tensor] = {}
        # All of them now: two threads that met in a new one's making would have one each.
        self.between: dict[tuple[int, int], queue.Queue[Tensor]] = {
            pair: queue.Queue() for pair in product(range(RANKS), repeat=2)
        }
        self.sent = 0


class Rank(GroupCoordinator):
    """One of them."""

    def __init__(self, wires: Wires, rank: int) -> None:
        super().__init__(tuple(range(RANKS)), rank)
        object.__setattr__(self, "wires", wires)

    def all_reduce(self, x: Tensor, in_place: bool = False) -> Tensor:
        self.wires.sums[self.rank_in_group] = x
        self.wires.barrier.wait()
        total = torch.stack(list(self.wires.sums.values())).sum(0)
        self.wires.barrier.wait()
        return total

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        own = self.rank_in_group
        for x, target in sends:
            assert x.is_contiguous() and target != own
            self.wires.between[own, target].put(x.clone())
            self.wires.sent += 1
        for x, source in receives:
            x.copy_(self.wires.between[source, own].get(timeout=60))


def rank_layers(
    shape: MixtureShape, quant_config: QuantizationConfig | None, num_layers: int = 2
) -> list[nn.ModuleList]:
    """Of each rank. What experts have is random, and follows from the layer and the expert."""
    parallel = ParallelConfig(
        enable_expert_parallel=True,
        tensor_parallel_size=RANKS,
        enable_eplb=True,
        eplb_config=EPLBConfig(num_redundant_experts=REDUNDANT),
    )
    ranks = []
    for rank in range(RANKS):
        with set_current_vllm_config(VllmConfig(parallel_config=parallel)), as_rank(rank, RANKS):
            layers = nn.ModuleList(
                MixtureOfExperts(shape, f"model.layers.{i}.mlp", quant_config)
                for i in range(num_layers)
            )
        initialize_dummy_weights(layers)
        ranks.append(layers)
        for i, layer in enumerate(layers):
            fill(layer, i)
    return ranks


def content(layer: int, expert: int, name: str, like: Tensor) -> Tensor:
    """Bytes, as many as one expert's part of a parameter has."""
    made = torch.Generator().manual_seed(1000 * layer + expert + 100_000 * len(name))
    size = like.numel() * like.element_size()
    return torch.randint(0, 100, (size,), generator=made, dtype=torch.uint8)


def fill(layer: MixtureOfExperts, number: int) -> None:
    for name, param in layer.experts.named_parameters():
        for place, expert in enumerate(layer.experts.stack.experts):
            part = param.data[place]
            part.view(-1).view(torch.uint8).copy_(content(number, expert, name, part))


def is_filled(layer: MixtureOfExperts, number: int) -> bool:
    return all(
        torch.equal(
            param.data[place].view(-1).view(torch.uint8),
            content(number, expert, name, param.data[place]),
        )
        for name, param in layer.experts.named_parameters()
        for place, expert in enumerate(layer.experts.stack.experts)
    )


def together(balancers: Sequence[ExpertBalancer], act: Callable[[ExpertBalancer], Any]) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(act, balancers))


def count(layers: nn.ModuleList, tokens: Sequence[int]) -> None:
    for layer in layers:
        assert layer.counts is not None
        layer.counts += torch.tensor(tokens)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A step, in which ranks do not add up what they have."""
    monkeypatch.setattr(moe, "tensor_model_parallel_all_reduce", lambda x, in_place: x)
    with set_forward_context(ForwardContext({}, {})):
        yield


@pytest.mark.parametrize(
    ("shape", "quant_config"),
    [
        (PLAIN, None),
        (BIASED, None),
        (PLAIN, Fp8Config("rows")),
        (replace(PLAIN, intermediate_size=256), Fp8Config("block")),
    ],
    ids=["16 bits", "biases", "float8 rows", "float8 blocks"],
)
@pytest.mark.parametrize("staged_bytes", [999, 2**25])
def test_everything_an_expert_has_moves(
    shape: MixtureShape,
    quant_config: QuantizationConfig | None,
    staged_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of any size, once and again."""
    monkeypatch.setattr(expert_balancer, "_STAGED_BYTES", staged_bytes)
    wires, ranks = Wires(), rank_layers(shape, quant_config)
    balancers = [ExpertBalancer([layers], Rank(wires, i)) for i, layers in enumerate(ranks)]
    began = [[layer.experts.stack.experts for layer in layers] for layers in ranks]
    for tokens in ([1, 90, 2, 80, 3, 70, 4, 60], [500, 1, 1, 1, 30, 1, 1, 40]):
        together(balancers, ExpertBalancer.begin_window)
        for rank, layers in enumerate(ranks):
            count(layers, [one * (rank + 1) for one in tokens])
        together(balancers, ExpertBalancer.rearrange)
        assert all(is_filled(layer, i) for layers in ranks for i, layer in enumerate(layers))
        for before, after in balancers[0].balancedness.values():
            assert 0.25 <= before < after <= 1
        assert all(one.balancedness == balancers[0].balancedness for one in balancers)
        now = [[layer.experts.stack.experts for layer in layers] for layers in ranks]
        assert now != began and wires.sent
        for held in zip(*now, strict=True):
            assert {expert for rank in held for expert in rank} == set(range(EXPERTS))
        for rank, layers in enumerate(ranks):
            for layer in layers:
                placement = layer.copies.placement
                assert layer.experts.stack.experts == placement.experts_of(rank)
                assert layer.copies.slots[:-1].tolist() == placement.table()


def test_ranks_add_up_to_the_same_after_a_rearrangement() -> None:
    ranks = rank_layers(PLAIN, None, 1)
    router = ranks[0][0].router.weight
    router.data.normal_()
    stacks = {}
    for (layer,) in ranks:
        layer.router.weight.data.copy_(router.data)
        for name, param in layer.experts.named_parameters():
            whole = stacks.setdefault(name, torch.randn(EXPERTS, *param.shape[1:]) / 4)
            param.data.copy_(whole[list(layer.experts.stack.experts)])
    x = torch.randn(40, HIDDEN)
    expected = sum(layer(x) for (layer,) in ranks)
    wires = Wires()
    balancers = [ExpertBalancer([layers], Rank(wires, i)) for i, layers in enumerate(ranks)]
    for (layer,) in ranks:
        layer.counts.copy_(torch.tensor([1, 1, 1, 1, 1, 60, 80, 200]))
    together(balancers, ExpertBalancer.rearrange)
    assert wires.sent
    found = sum(layer(x) for (layer,) in ranks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_stage_without_experts_has_nothing_to_do() -> None:
    balancer = ExpertBalancer([nn.Linear(2, 2)], Rank(Wires(), 0))
    balancer.begin_window()
    balancer.rearrange()
    assert balancer.balancedness == {}


def test_only_the_window_decides() -> None:
    wires, ranks = Wires(), rank_layers(PLAIN, None, 1)
    balancers = [ExpertBalancer([layers], Rank(wires, i)) for i, layers in enumerate(ranks)]
    assert balancers[0].balancedness == {}
    for layers in ranks:
        count(layers, [10**6, *[0] * 7])
    together(balancers, ExpertBalancer.begin_window)
    together(balancers, ExpertBalancer.rearrange)
    assert not wires.sent and balancers[0].balancedness == {"model.layers.0.mlp": [1.0, 1.0]}
    for layers in ranks:
        count(layers, [0, 5000, *[0] * 6])
    together(balancers, ExpertBalancer.rearrange)
    ((before, after),) = balancers[0].balancedness.values()
    assert wires.sent and before < 0.6 and after == 1.0
