# SPDX-License-Identifier: Apache-2.0
"""Angles against transformers, and what is refused."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.9,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
]
YARN_MSCALE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
}
MAX_POSITION = 2048


@pytest.mark.parametrize("parameters", VARIANTS, ids=lambda p: p["rope_type"])
def test_table_equals_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(head_dim=64, rope_parameters=parameters)
    positions = torch.arange(MAX_POSITION)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = get_rope(64, MAX_POSITION, rope_parameters=parameters).cos_sin_cache
    assert table.dtype == torch.float32 and table.shape == (MAX_POSITION, 64)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=1e-7)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=1e-7)


def test_multimodal_sections_with_text_positions() -> None:
    parameters = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    config = Qwen3_5TextConfig(head_dim=64, rope_parameters=parameters)
    rows = torch.arange(100).expand(3, 1, 100)
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), rows)
    table = get_rope(64, 100, rope_parameters=parameters).cos_sin_cache
    assert table.shape == (100, 16)
    torch.testing.assert_close(table[:, :8], cos[0, :, :8], rtol=0, atol=1e-7)
    torch.testing.assert_close(table[:, 8:], sin[0, :, :8], rtol=0, atol=1e-7)


def test_forward_rotates_as_transformers() -> None:
    config = LlamaConfig(head_dim=16, rope_parameters=VARIANTS[0])
    positions = torch.tensor([3, 0, 17])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rope = get_rope(16, 32, rope_parameters=VARIANTS[0])
    for found, wanted in zip(rope(positions, q.flatten(1), k.flatten(1)), expected, strict=True):
        torch.testing.assert_close(found, wanted[0].transpose(0, 1).flatten(1))


def test_partial_rotation_keeps_the_rest() -> None:
    rope = get_rope(16, 32, rope_parameters={**VARIANTS[0], "partial_rotary_factor": 0.5})
    q = torch.randn(2, 16)
    rotated, _ = rope(torch.tensor([5, 9]), q, q)
    assert torch.equal(rotated[:, 8:], q[:, 8:])
    assert not torch.isclose(rotated[:, :8], q[:, :8]).all(dim=1).any()


def test_table_is_shared_while_in_use() -> None:
    first = get_rope(16, 48, rope_parameters=VARIANTS[0])
    assert get_rope(16, 48, rope_parameters=dict(VARIANTS[0])) is first
    assert get_rope(16, 64, rope_parameters=VARIANTS[0]) is not first
    assert get_rope(16, 48, rope_parameters=VARIANTS[1]) is not first
    with set_current_vllm_config(VllmConfig()):  # a model of another engine
        assert get_rope(16, 48, rope_parameters=VARIANTS[0]) is not first
    table = weakref.ref(first.cos_sin_cache)
    del first
    gc.collect()
    assert table() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported.*llama3"),
        (
            {"rope_parameters": YARN_MSCALE},
            "'yarn' with mscale is not supported; give attention_factor",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "'llama3' needs high_freq_factor, original_max_position_embeddings; got",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"is_neox_style": False}, "interleaved"),
        ({"rope_parameters": {"mrope_section": [4, 4, 4]}}, "must sum to half"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_rope(16, 32, **arguments)


def test_image_positions_are_refused() -> None:
    rope = get_rope(16, 32)
    with pytest.raises(ValueError, match="multimodal"):
        rope(torch.zeros(3, 2, dtype=torch.long), torch.zeros(2, 16), torch.zeros(2, 16))


@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_a_table_without_values_has_the_same_shape(partial: float) -> None:
    parameters = {"rope_theta": 10000.0, "partial_rotary_factor": partial}
    real = get_rope(64, 128, rope_parameters=parameters).cos_sin_cache
    with torch.device("meta"):
        table = get_rope(64, 128, rope_parameters=parameters).cos_sin_cache
        with pytest.raises(ValueError, match="mscale"):
            get_rope(
                64,
                128,
                rope_parameters=parameters | {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0},
            )
    assert table.is_meta and (table.shape, table.dtype) == (real.shape, real.dtype)


def test_a_table_without_values_does_not_import_the_compiler() -> None:
    """Which takes seconds of every command that outlines a model."""
    program = """
import sys, torch
from vllm.model_executor.layers.rotary_embedding import get_rope
with torch.device("meta"):
    get_rope(64, 128, rope_parameters={"rope_theta": 10000.0})
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
