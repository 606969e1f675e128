# SPDX-License-Identifier: Apache-2.0
"""Fields of a config that change what transformers computes: served, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.harness import make_config
from tests.tiny_models import tiny_model
from vllm.config import LoadConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader import get_model_loader

_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_WHOLE = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4}


def build(family: str, directory: Path, fields: dict[str, Any]) -> None:
    """The model of a config with other `fields`, without weights."""
    config = json.loads((tiny_model(family) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    vllm_config = make_config(directory)
    get_model_loader(LoadConfig()).build_model(vllm_config, vllm_config.model_config)


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("deepseek_v2", _HALF),
        ("deepseek_v3", _HALF),
        ("gemma3", {"full_attention": _HALF, "sliding_attention": _WHOLE}),
        ("granite_h_dense", _HALF),
        ("llama", _HALF),
        ("olmo_hybrid", _HALF),
    ],
)
def test_rotations_of_a_part_of_each_head(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """transformers rotates all of a head in these families, whatever the factor is."""
    with pytest.raises(VLLMValidationError, match=r"partial_rotary_factor 0\.5 is not supported"):
        build(family, tmp_path, {"rope_parameters": rope})


@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        ("qwen3_next", "shared_expert_intermediate_size", 0, "shared_expert_intermediate_size 0"),
        ("qwen3_5_moe", "shared_expert_intermediate_size", 0, "shared_expert_intermediate_size 0"),
        ("mixtral", "hidden_act", "gelu", "hidden_act 'gelu' is not supported; supported: 'silu'"),
        ("deepseek_v3", "n_group", 8, "8 experts in 8 groups: .* it needs two"),
        ("deepseek_v3", "num_experts_per_tok", 8, "8 experts of 8 in 4 groups"),
        ("deepseek_v3", "topk_group", 5, "5 groups of experts of 4"),
        ("qwen3", "layer_types", ["chunked_attention"] * 4, "layer 0 has type 'chunked_attention'"),
        (
            "qwen3_sliding",
            "sliding_window",
            None,
            "layer 2 is of type 'sliding_attention', but .*None",
        ),
        ("gemma3", "sliding_window", None, "layer 0 is of type 'sliding_attention', but .*None"),
        ("gpt_oss", "sliding_window", 0, "sliding_window 0 is not supported; .* at least 1"),
        ("mixtral", "sliding_window", 0, "sliding_window 0 is not supported; .* at least 1"),
        ("olmo_hybrid", "linear_num_key_heads", 8, "4 value heads for 8 key heads"),
        ("qwen3_5", "linear_num_value_heads", 3, "3 value heads for 2 key heads"),
        ("nemotron_h", "n_groups", 3, "8 heads for 3 groups"),
        ("llama", "rope_parameters", {**_WHOLE, "rope_theta": None}, "rope_theta None"),
        ("llama", "rope_parameters", {**_WHOLE, "rope_theta": "1e4"}, "rope_theta '1e4'"),
        ("qwen3", "rope_parameters", {**_LINEAR, "factor": "2"}, "factor '2'; it must be a number"),
        ("bamba", "mamba_d_conv", 8, "convolution of 8 taps .*supported: 2 to 4"),
        ("qwen3_5", "linear_conv_kernel_dim", 1, "convolution of 1 taps .*supported: 2 to 4"),
        ("llama", "num_key_value_heads", 3, "4 query heads for 3 key/value heads"),
        ("falcon_h1", "num_key_value_heads", 8, "4 query heads for 8 key/value heads"),
    ],
)
def test_what_is_not_served_is_named(
    family: str, field: str, value: Any, message: str, tmp_path: Path
) -> None:
    """As an error of the user's, which the command line says in one line."""
    with pytest.raises(VLLMValidationError, match=message):
        build(family, tmp_path, {field: value})
