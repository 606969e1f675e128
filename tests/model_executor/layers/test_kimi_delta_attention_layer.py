# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention's layer: shards of it, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.model_executor.harness import make_config
from tests.model_executor.layers.mixer_steps import run
from tests.model_executor.layers.ranks import as_rank
from tests.tiny_models import tiny_model
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.kimi_delta_attention import (
    KimiDeltaAttention,
    KimiDeltaAttentionShape,
)
from vllm.model_executor.models.weights import AutoWeightsLoader

SHAPE = KimiDeltaAttentionShape(32, num_heads=4, head_dim=8, conv_kernel_size=4, eps=1e-5)


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    config = make_config(tiny_model("qwen3_5"))
    with set_current_vllm_config(config):
        yield config


def checkpoint() -> dict[str, Tensor]:
    """As Kimi-Linear names and shapes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "b_proj.weight": (4, 32),
        "f_a_proj.weight": (8, 32),
        "f_b_proj.weight": (32, 8),
        "g_a_proj.weight": (8, 32),
        "g_b_proj.weight": (32, 8),
        "A_log": (1, 1, 4, 1),
        "dt_bias": (32,),
        "o_norm.weight": (8,),
        "o_proj.weight": (32, 32),
    }
    shapes |= {f"{name}_proj.weight": (32, 32) for name in "qkv"}
    shapes |= {f"{name}_conv1d.weight": (32, 1, 4) for name in "qkv"}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float32) * 0.5
        for name, shape in shapes.items()
    }


def build(prefix: str, rank: int, size: int) -> KimiDeltaAttention:
    with as_rank(rank, size):
        layer = KimiDeltaAttention(SHAPE, prefix)
    loader = AutoWeightsLoader(layer, fused=KimiDeltaAttention.CHECKPOINT_NAMES)
    loader.load_weights(checkpoint().items())
    return layer


def test_shards_sum_to_the_whole_layer(config: VllmConfig) -> None:
    """Every projection, the convolutions and the decays are cut by heads."""
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    whole = run(build("whole", 0, 1), config, hidden, decodes=2)
    halves = [run(build(f"half{rank}", rank, 2), config, hidden, decodes=2) for rank in range(2)]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(halves[0], whole, atol=1e-3)


def test_decays_stay_fp32_in_a_16_bit_model(config: VllmConfig) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = build("layer", 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert torch.equal(layer.A_log, checkpoint()["A_log"].flatten())
    assert layer.qkvb_proj.weight.dtype == torch.bfloat16


def test_what_it_keeps(config: VllmConfig) -> None:
    layer = build("layer", 1, 2)
    spec = layer.get_kv_cache_spec(config)
    assert spec.shapes == ((3, 48), (2, 8, 8))
    shape = layer.journal_shape(spec)
    assert shape.channels == 48
    assert shape.token_shapes == ((2, 8), (2, 8), (2, 8))
