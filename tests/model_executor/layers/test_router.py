# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture: its logits' rows, and the table of tokens that have experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.router import Router
from vllm.model_executor.model_loader.base import initialize_dummy_weights
from vllm.model_executor.parameter import WeightShapeError
from vllm.model_executor.utils import get_weight_attr

HIDDEN, EXPERTS, VOCAB = 16, 5, 7
SHAPE = MixtureShape(HIDDEN, 12, EXPERTS, RoutingRule(2))
GATED = replace(SHAPE, shared_intermediate_size=24, shared_gate=True)
BY_TOKEN = replace(SHAPE, hashed_vocab=VOCAB)


def load(param: nn.Parameter | None, *args: object) -> None:
    assert param is not None
    get_weight_attr(param, "weight_loader", None)(param, *args)


@pytest.mark.parametrize("wide", [False, True])
def test_logits_are_the_experts_then_the_shared_ones_gate_then_zeros(wide: bool) -> None:
    router = Router(replace(GATED, wide_router=wide, router_bias=True))
    gate, shared, x = torch.randn(EXPERTS, HIDDEN), torch.randn(1, HIDDEN), torch.randn(3, HIDDEN)
    bias = torch.randn(EXPERTS)
    load(router.weight, gate, 0)
    load(router.weight, shared, 1)
    load(router.bias, bias, 0)
    logits = router(x.to(torch.bfloat16) if wide else x)
    assert logits.dtype == torch.float32
    x = x.to(torch.bfloat16).float() if wide else x
    expected = torch.cat((x @ gate.T + bias, x @ shared.T, torch.zeros(3, 2)), 1)
    torch.testing.assert_close(logits, expected)


def test_a_gate_of_other_experts_is_refused() -> None:
    with pytest.raises(WeightShapeError, match=r"expected shape \[5, 16\], found \[6, 16\]"):
        load(Router(SHAPE).weight, torch.zeros(6, HIDDEN), 0)


def test_a_table_chooses_experts_that_there_are() -> None:
    assert Router(SHAPE).chosen(None) is None
    router, table = Router(BY_TOKEN), torch.arange(2 * VOCAB).view(VOCAB, 2) % EXPERTS
    load(router.tid2eid, table)
    chosen = router.chosen(torch.tensor([6, 0, 6]))
    assert chosen is not None
    assert chosen.tolist() == [[2, 3], [0, 1], [2, 3]]
    with pytest.raises(ValueError, match="needs token ids, not embeddings"):
        router.chosen(None)
    for wrong in (EXPERTS, -1):
        table[3, 1] = wrong
        with pytest.raises(ValueError, match="tid2eid names experts outside 0..4"):
            load(router.tid2eid, table)


def test_dummy_tables_name_every_expert() -> None:
    router = Router(BY_TOKEN)
    initialize_dummy_weights(router)
    assert router.tid2eid is not None
    assert set(router.tid2eid.unique().tolist()) == set(range(EXPERTS))
