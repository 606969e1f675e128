# SPDX-License-Identifier: Apache-2.0
"""The rules of DeepSeek-V2 and V3; their outputs are compared with transformers' in test_parity."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.harness import Chunk, Harness
from tests.tiny_configs import CONFIGS
from tests.tiny_models import hf_reference_logits, make_tiny, tiny_model
from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models import deepseek_v3
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer
from vllm.model_executor.models.deepseek_v3 import DeepseekV3DecoderLayer, rope_and_scale

FAMILY = "deepseek_v3"
IDS = list(range(40, 77))


def of(**rope: Any) -> tuple[dict[str, Any], float]:
    sizes = {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16}
    return rope_and_scale(SimpleNamespace(rope_parameters=rope, **sizes))  # type: ignore[arg-type]


def test_temperatures() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert of(**plain, mscale_all_dim=1.0) == (plain, 0.125)
    yarn = {"rope_type": "yarn", "factor": 40.0}
    assert of(**yarn, mscale=1.0) == (yarn, 0.125)
    rope, scale = of(**yarn, mscale_all_dim=1.0)
    assert rope == yarn and scale == pytest.approx(0.125 * (1 + 0.1 * math.log(40)) ** 2)
    rope, scale = of(**yarn, mscale=1.0, mscale_all_dim=0.5)
    ratio = (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40))
    assert rope == yarn | {"attention_factor": pytest.approx(ratio)}
    assert of(**yarn, mscale=1.0, mscale_all_dim=0.5, attention_factor=1.25)[0] == (
        yarn | {"attention_factor": 1.25}
    )


def test_tensors_have_the_names_of_released_checkpoints() -> None:
    """Those of a layer with experts, one of them shown."""
    names = {
        name.removeprefix("model.layers.1.")
        for name in load_file(tiny_model(FAMILY) / "model.safetensors")
        if name.startswith("model.layers.1.")
        and not any(f".{i}." in name[15:] for i in range(1, 8))
    }
    attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
    networks = ("experts.0", "shared_experts")
    assert names == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        *(f"self_attn.{name}.weight" for name in (*attention, "kv_b_proj", "o_proj")),
        *(f"mlp.{n}.{part}_proj.weight" for n in networks for part in ("gate", "up", "down")),
    }


@pytest.mark.parametrize(
    ("layer", "family", "field", "value"),
    [
        (DeepseekV3DecoderLayer, FAMILY, "scoring_func", "softmax"),
        (DeepseekV3DecoderLayer, FAMILY, "topk_method", "greedy"),
        (DeepseekV3DecoderLayer, FAMILY, "moe_layer_freq", 2),
        (DeepseekV2DecoderLayer, "deepseek_v2", "scoring_func", "sigmoid"),
        (DeepseekV2DecoderLayer, "deepseek_v2", "moe_layer_freq", 2),
        (DeepseekV2DecoderLayer, "deepseek_v2", "topk_method", "noaux_tc"),
        (DeepseekV2DecoderLayer, "deepseek_v2", "norm_topk_prob", True),
    ],
)
def test_experts_of_other_rules_are_refused(
    layer: type[DeepseekV3DecoderLayer], family: str, field: str, value: Any
) -> None:
    config = CONFIGS[family]()
    setattr(config, field, value)
    with pytest.raises(VLLMValidationError, match=f"{field}.* is not supported; "):
        layer.mixture(config, "model.layers.1.mlp")


def test_layers_that_draft_are_not_loaded(tmp_path: Path) -> None:
    path = make_tiny(FAMILY, tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors |= {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    decisions.clear()
    Harness(path)
    (found,) = [one for one in decisions.decisions() if "model.layers.4." in one.what]
    assert found.chosen == "not loaded"


LAYER, ROPE = deepseek_v3.MultiHeadLatentAttention, deepseek_v3.rope_and_scale


def _without_factor(config: Any) -> tuple[dict[str, Any], float]:
    rope, scale = ROPE(config)
    return rope | {"attention_factor": 1.0}, scale


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("MultiHeadLatentAttention", lambda *a, **o: LAYER(*a, **o | {"interleaved": False})),
        ("rope_and_scale", lambda config: (ROPE(config)[0], 24**-0.5)),
        ("rope_and_scale", _without_factor),
    ],
    ids=["halves", "scale", "factor"],
)
def test_the_comparison_notices(what: str, instead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of what rotates, or another temperature, is far outside its tolerance."""
    expected = hf_reference_logits(tiny_model(FAMILY), IDS)
    monkeypatch.setattr(deepseek_v3, what, instead)
    found = Harness(tiny_model(FAMILY)).logits([Chunk(0, 0, IDS)])
    assert (found - expected).abs().max() > 1e-3 * expected.std()


def test_both_choices_of_experts_of_v2(tmp_path: Path) -> None:
    """In the best groups, and in all: they differ. In two pieces."""
    found = []
    for path in (
        tiny_model("deepseek_v2"),
        make_tiny("deepseek_v2", tmp_path, topk_method="greedy"),
    ):
        harness, expected = Harness(path), hf_reference_logits(path, IDS)
        parts = [harness.logits([Chunk(0, 0, IDS[:20])]), harness.logits([Chunk(0, 20, IDS[20:])])]
        found.append(torch.cat(parts))
        assert (found[-1] - expected).abs().max() < 5e-5 * expected.std()
    assert (found[0] - found[1]).abs().max() > 1e-2 * found[0].std()
