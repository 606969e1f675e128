# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's `quantization_config` says, and which layers it means."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from vllm.model_executor.layers.quantization.fp8_block import Fp8BlockMethod
from vllm.model_executor.layers.quantization.fp8_config import (
    Fp8Config,
    fp8_from_checkpoint,
    fp8_from_compressed_tensors,
    fp8_from_modelopt,
)
from vllm.model_executor.layers.quantization.fp8_rows import Fp8RowsMethod
from vllm.model_executor.layers.quantization.unquantized import UnquantizedLinearMethod
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.deepseek_v3 import DeepseekV3ForCausalLM
from vllm.model_executor.models.kimi_linear import KimiLinearForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

LAYER = nn.Module()
PER_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
FLOAT8 = {"type": "float", "num_bits": 8}


def compressed(weights: dict[str, Any], inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **fields}


def test_block_checkpoints() -> None:
    config = fp8_from_checkpoint({"weight_block_size": [128, 128], "fmt": "e4m3"})
    assert isinstance(config.get_quant_method(LAYER, "a.o_proj"), Fp8BlockMethod)


@pytest.mark.parametrize("scheme,static", [("dynamic", False), ("static", True), (None, False)])
def test_per_tensor_checkpoints(scheme: str | None, static: bool) -> None:
    config = fp8_from_checkpoint({"activation_scheme": scheme, "weight_block_size": None})
    method = config.get_quant_method(LAYER, "a.o_proj")
    assert isinstance(method, Fp8RowsMethod)
    assert method.static is static and not method.from_16_bit
    assert config.suffixes[".weight_scale_inv"] == ".weight_scale"


@pytest.mark.parametrize(
    "weights,inputs,static",
    [
        ("channel", {"strategy": "token", "dynamic": True}, False),
        ("tensor", {"strategy": "tensor", "dynamic": False}, True),
    ],
)
def test_compressed_tensors(weights: str, inputs: dict[str, Any], static: bool) -> None:
    stored = compressed({**FLOAT8, "strategy": weights}, {**FLOAT8, **inputs}, ignore=["lm_head"])
    config = fp8_from_compressed_tensors(stored)
    assert config.static is static and config.excluded == ("lm_head",)
    assert config.name == "compressed-tensors"


BLOCK = {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}
BY_GROUP = {**FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True}


def test_compressed_blocks() -> None:
    no_more = {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    config = fp8_from_compressed_tensors(compressed(BLOCK, BY_GROUP, ignore=["lm_head"], **no_more))
    assert (config.weights, config.excluded) == ("block", ("lm_head",))
    assert config.suffixes == {".weight_scale": ".weight_scale_inv"}


@pytest.mark.parametrize("weight_block_size", [None, [128, 128]])
def test_float8_modules_under_all_keys_are_kept(weight_block_size: list[int] | None) -> None:
    """Writers of checkpoints have different keys, and some write two."""
    keys = {"modules_to_not_convert": ["a", "b"], "ignored_layers": ["b", "c"], "ignore": ["d"]}
    config = fp8_from_checkpoint({"weight_block_size": weight_block_size, **keys})
    assert config.excluded == ("a", "b", "c", "d")


def test_modelopt_modules_under_both_keys_are_kept() -> None:
    kept = {"ignore": ["a"], "exclude_modules": ["b", "a"]}
    assert fp8_from_modelopt({"quant_algo": "FP8", **kept}).excluded == ("a", "b")


@pytest.mark.parametrize(("algorithm", "static"), [("FP8", True), (PER_CHANNEL, False)])
@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_modelopt(algorithm: str, static: bool, key: str) -> None:
    kept = ["lm_head", "model.layers.0.self_attn*"]
    config = fp8_from_modelopt({"quant_algo": algorithm, key: kept, "kv_cache_quant_algo": None})
    assert (config.static, config.weights, config.name) == (static, "rows", "modelopt")
    assert config.is_excluded("model.layers.0.self_attn.o_proj")
    assert not config.is_excluded("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_algo": "NVFP4"}, "quant_algo 'NVFP4'; supported: FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "'INT8'; supported: FP8"),
    ],
)
def test_other_modelopt_variants_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_from_modelopt(fields)


@pytest.mark.parametrize(
    "stored,message",
    [
        ({"weight_block_size": [64, 64]}, r"blocks of \[64, 64\].*supported: \[128, 128\]"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "static activation"),
        ({"activation_scheme": "other"}, "activation_scheme 'other'; supported: dynamic, static"),
        ({"scale_fmt": "e5m2"}, "scale_fmt 'e5m2'; supported: float, ue8m0"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'; supported: e4m3"),
        ({"weight_block_size": 128}, r"blocks of 128.*supported: \[128, 128\]"),
        ({"ignored_layers": "lm_head"}, "ignored_layers 'lm_head'; it must be a list of names"),
        ({"modules_to_not_convert": [1]}, r"modules_to_not_convert \[1\]; it must be a list"),
    ],
)
def test_other_fp8_variants_are_refused(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_from_checkpoint(stored)


@pytest.mark.parametrize(
    "stored,message",
    [
        (compressed({"type": "int", "num_bits": 4}, {}), r"\('int', 4\)"),
        (compressed({**FLOAT8, "strategy": "channel"}, {}), r"activations \(None, None\)"),
        (
            compressed(
                {**FLOAT8, "strategy": "tensor"},
                {**FLOAT8, "strategy": "tensor", "dynamic": True},
            ),
            "must be per token",
        ),
        (compressed({**BLOCK, "block_structure": [64, 128]}, BY_GROUP), r"\[64, 128\] with"),
        (compressed(BLOCK, {**BY_GROUP, "group_size": 64}), "by 64"),
        (compressed(BLOCK, {**BY_GROUP, "dynamic": False}), "static"),
        (compressed(BLOCK, {**FLOAT8, "strategy": "token", "dynamic": True}), "per block"),
        ({"config_groups": {}}, r"0 group\(s\)"),
        ({"config_groups": [{}]}, r"config_groups \[{}\]; it must be an object of objects"),
        ({"config_groups": {"a": 1}}, r"config_groups {'a': 1}; it must be an object of objects"),
        (compressed(BLOCK, BY_GROUP, ignore="lm_head"), "ignore 'lm_head'; it must be a list"),
        (
            compressed(BLOCK, BY_GROUP, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity format 'sparse-24-bitmask'.*supported: dense",
        ),
        (
            compressed(BLOCK, BY_GROUP, transform_config={"config_groups": {"R1": {}}}),
            r"rotations of activations \(transform_config\)",
        ),
    ],
)
def test_other_compressed_variants_are_refused(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_from_compressed_tensors(stored)


def named(*excluded: str) -> Fp8Config:
    config = Fp8Config(excluded=excluded)
    config.use_names(Qwen3_5ForCausalLM.fused_names, Qwen3_5ForCausalLM.weights_mapper)
    return config


@pytest.mark.parametrize(
    "entry,prefix,expected",
    [
        ("model.language_model.layers.1.mlp", "model.layers.1.mlp.down_proj", True),
        ("model.language_model.layers.1.mlp", "model.layers.11.mlp.down_proj", False),
        ("o_proj", "model.layers.0.self_attn.o_proj", True),
        ("proj", "model.layers.0.self_attn.o_proj", False),
        ("re:.*layers[.]3[.].*", "model.layers.3.mlp.gate_up_proj", True),
        ("*.mlp.*", "model.layers.3.mlp.gate_up_proj", True),
        ("lm_head", "model.layers.3.mlp.gate_up_proj", False),
        ("model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_ba", True),
        ("model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_qkvz", False),
    ],
)
def test_excluded_modules(entry: str, prefix: str, expected: bool) -> None:
    config = named(entry)
    assert config.is_excluded(prefix) is expected
    method = config.get_quant_method(LAYER, prefix)
    assert isinstance(method, UnquantizedLinearMethod) is expected
    config.use_names(Qwen3_5ForCausalLM.fused_names, Qwen3_5ForCausalLM.weights_mapper)
    assert config.is_excluded(prefix) is expected


@pytest.mark.parametrize(
    "model,entry,prefix",
    [
        (
            Qwen3_5ForCausalLM,
            r"re:model\.language_model\.layers\.\d+\.mlp\..*",
            "model.layers.1.mlp.down_proj",
        ),
        (Qwen3_5ForCausalLM, "model.language_model.*.mlp", "model.layers.1.mlp.down_proj"),
        (DeepseekV3ForCausalLM, "re:.*shared_experts.*", "model.layers.1.mlp.shared_expert.down"),
        (
            KimiLinearForCausalLM,
            r"re:.*block_sparse_moe\.shared_experts\..*",
            "model.layers.1.mlp.shared_expert.down_proj",
        ),
        (
            NemotronHForCausalLM,
            "backbone.layers.*.mixer.shared_experts*",
            "model.layers.1.mixer.shared_expert.down_proj",
        ),
    ],
)
def test_patterns_are_of_the_checkpoints_names(
    model: type[CausalLM], entry: str, prefix: str
) -> None:
    config = Fp8Config(excluded=[entry])
    config.use_names(model.fused_names, model.weights_mapper)
    assert config.is_excluded(prefix)
    assert not config.is_excluded("model.layers.1.self_attn.o_proj")


def test_layers_fused_in_the_checkpoint_are_listed_as_such() -> None:
    """Qwen3-Next's two projections, both excluded, are our one."""
    mixer = "model.layers.0.linear_attn"
    assert named(f"{mixer}.in_proj_qkvz", f"{mixer}.in_proj_ba").is_excluded(f"{mixer}.in_proj")


def test_part_of_a_fused_layer_cannot_be_excluded() -> None:
    both = named("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj")
    with pytest.raises(ValueError, match="does not quantise .*k_proj, .*v_proj but the other"):
        both.get_quant_method(LAYER, "model.layers.0.self_attn.qkv_proj")
    assert not both.is_excluded("model.layers.1.self_attn.qkv_proj")


def test_small_projections_stay_only_when_quantising_here() -> None:
    assert Fp8Config(from_16_bit=True).leaves_small(32)
    assert not Fp8Config(from_16_bit=True).leaves_small(128)
    assert not Fp8Config().leaves_small(32)
