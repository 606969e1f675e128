# SPDX-License-Identifier: Apache-2.0
"""Comparisons of logits with transformers can fail: what a family adds to Llama's layers, damaged,
changes what its tiny model computes. Mixtures' experts are in tests/parity/test_expert_power."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.model_executor.harness import Chunk, Harness, make_config
from tests.tiny_models import hf_reference_logits, tiny_model
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.moe import mixtures_of
from vllm.model_executor.layers.self_attention import SelfAttention

pytestmark = pytest.mark.parity

#: in units of the logits' standard deviation; `NOTICED` is what a damage has to exceed
TOLERANCE, NOTICED = 5e-5, 5e-3
#: longer than Mixtral's window
IDS = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(4)).tolist()

WHOLE_HEADS = {"partial_rotary_factor": 1.0, "mrope_section": None}


def error(family: str, harness: Harness) -> float:
    path = tiny_model(family)
    found, expected = harness.logits([Chunk(0, 0, IDS)]), hf_reference_logits(path, IDS)
    return float((found - expected).abs().max() / expected.std())


def attentions(model: nn.Module) -> Iterator[SelfAttention]:
    return (module for module in model.modules() if isinstance(module, SelfAttention))


def _open_gates(model: nn.Module) -> None:
    """All gates of attention are half open: their rows stand behind each head's queries."""
    for attention in attentions(model):
        rows = attention.qkv_proj.weight.data[: attention.qkv_proj.q_size]
        rows.unflatten(0, (attention.num_heads, 2, -1))[:, 1] = 0


def _no_norm_of_queries(model: nn.Module) -> None:
    for attention in attentions(model):
        attention.q_norm = None


def _no_norm_of_keys(model: nn.Module) -> None:
    for attention in attentions(model):
        attention.k_norm = None


def _no_biases(model: nn.Module) -> None:
    for attention in attentions(model):
        assert attention.qkv_proj.bias is not None and attention.o_proj.bias is None
        attention.qkv_proj.bias.data.zero_()


def _no_bias_of_routers(model: nn.Module) -> None:
    for mixture in mixtures_of(model):
        assert mixture.router.bias is not None
        mixture.router.bias.data.zero_()


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        ("qwen2", _no_biases),
        ("qwen3_next", _open_gates),
        ("qwen3_5_moe", _open_gates),
        ("qwen3_moe", _no_norm_of_queries),
        ("qwen3_moe", _no_norm_of_keys),
        ("gpt_oss", _no_bias_of_routers),
    ],
)
def test_every_part_matters(family: str, damage: Callable[[nn.Module], None]) -> None:
    harness = Harness(tiny_model(family))
    assert error(family, harness) < TOLERANCE
    damage(harness.model)
    assert error(family, harness) > NOTICED


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_norms_scale_by_one_plus_their_weight(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GemmaRMSNorm, "one_plus", False)
    assert error(family, Harness(tiny_model(family))) > NOTICED


@pytest.mark.parametrize(
    ("family", "field", "change"),
    [
        *(
            (family, "rope_parameters", lambda rope: {**rope, **WHOLE_HEADS})
            for family in ("qwen3_next", "qwen3_5_moe")
        ),
        *((family, "sliding_window", lambda _: None) for family in ("mistral", "mixtral")),
        ("qwen2", "layer_types", lambda types: ["full_attention"] * len(types)),
    ],
)
def test_every_field_matters(family: str, field: str, change: Callable[[Any], Any]) -> None:
    config = make_config(tiny_model(family))
    fields = config.model_config.hf_text_config
    setattr(fields, field, change(getattr(fields, field)))
    assert error(family, Harness(tiny_model(family), config=config)) > NOTICED
