# SPDX-License-Identifier: Apache-2.0
"""What is read in the config of an Apriel2 checkpoint: sizes and kinds of state, and what is
refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from apriel2_models import MAMBA, MIXERS, WINDOW, fixed, make_tensors, pattern, save, stochastic

from tests.model_executor.harness import Harness, make_config
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.weights import WeightsError
from vllm.model_executor.state_layers import collect_layers
from vllm.transformers_utils.config import get_config
from vllm.v1.core.state_groups import get_kv_cache_groups

# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixer", "changes", "message"),
    [
        ("attention", {"rotary": {"type": "pixtral_2d", "theta": 1.0}}, "rotary.type 'pixtral_2d'"),
        ("attention", {"rotary": {"type": "mistral_1d"}}, "rotary without theta"),
        ("attention", {"rotary": {"type": "mistral_1d", "theta": None}}, "rotary without theta"),
        ("attention", {"rotary": {"theta": "x"}}, "rotary.theta must be a number of at least 0"),
        ("attention", {"rotary": "mistral_1d"}, "rotary must be an object, got 'mistral_1d'"),
        (
            "attention",
            {"rotary": {"type": "llama3", "theta": 1.0, "scale_factor": 8.0}},
            "rotary 'llama3' without low_frequency_factor, high_frequency_factor, original_context",
        ),
        ("attention", {"causal": False}, "not causal"),
        ("attention", {"heads": None}, "heads must be a positive number, got None"),
        ("attention", {"heads": True}, "heads must be a positive number, got True"),
        ("sliding_window", {"head_groups": "2"}, "head_groups must be a positive number, got '2'"),
        ("attention", {"key_layer": True}, "key_layer must be an object, got True"),
        ("attention", {"key_layer": {"bias": True}}, "key_layer.bias must be an object, got True"),
        ("attention", {"heads": 3}, "3 query heads for 2 key/value heads are not"),
        ("attention", {"window_size": 0}, "window_size must be a positive number, got 0"),
        ("attention", {"type": "mystery"}, "a mixer of type 'mystery'.*attention.*gdn"),
        ("gdn", {"key_heads": 3}, "4 value heads for 3 key heads"),
        ("gdn", {"convolution_layer": {"kernel_size": 4, "activation": "relu"}}, "'relu'"),
        ("gdn", {"norm_eps": "x"}, "norm_eps must be a number of at least 0, got 'x'"),
        ("kda", {"convolution_layer": 4}, "convolution_layer must be an object, got 4"),
        ("kda", {"convolution_layer": {"kernel_size": "x"}}, "kernel_size must be a positive"),
        ("kda", {"normalization": {"epsilon": "x"}}, "epsilon must be a number of at least 0"),
        ("kda", {"normalization": "rms_norm"}, "normalization must be an object"),
        ("kda", {"normalization": {"activation": "relu"}}, "gate activation 'relu'"),
        ("kda", {"normalization": {"type": "layer_norm"}}, "normalization.type is 'layer_norm'"),
        ("sliding_window", {"type": "sliding_window", "window_size": None}, "without window_size"),
        ("mamba", {"d_state": 16}, "d_state 16 beside state_size 8"),
        ("mamba", {"state_size": 0}, "state_size must be a positive number, got 0"),
        ("mamba", {"d_inner": None, "expand": "x"}, "expand must be a number of at least 0"),
        ("mamba", {"dt_rank": -1}, "dt_rank must be a positive number, got -1"),
        ("mamba", {"conv_bias": None}, "conv_bias None is not supported; supported: true, false"),
        ("mamba", {"d_xb": 48}, "64 channels cannot share 48 in groups of 8"),
    ],
)
def test_what_a_mixer_cannot_be(mixer, changes, message, tmp_path):
    described = (MIXERS | MAMBA)[mixer]
    path = save(tmp_path, fixed(described | changes, 1), make_tensors(fixed(described, 1)))
    with pytest.raises((VLLMValidationError, ValueError), match=message):
        Harness(path)


@pytest.mark.parametrize(
    ("mlp", "message"),
    [
        ({"gated": False}, "an MLP without gate"),
        ({"activation": "gelu"}, "activation 'gelu'"),
        ({"add_linear_biases": True}, "with biases"),
        ({"layer_1": {"bias": {"enabled": True}}}, "with biases"),
        ({"type": "moe"}, "type 'moe'"),
    ],
)
def test_what_an_mlp_cannot_be(mlp, message, tmp_path):
    decoder = fixed(MIXERS["gdn"], 1)
    changed = copy.deepcopy(decoder)
    changed["block"]["mlp"] |= mlp
    with pytest.raises(VLLMValidationError, match=message):
        Harness(save(tmp_path, changed, make_tensors(decoder)))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"type": "spiral", "num_blocks": 1}, "decoder.type is 'spiral'"),
        ({"type": "fixed", "num_blocks": 1}, "decoder has no 'block'"),
        ({"type": "fixed"}, "decoder.num_blocks must be a positive number"),
        ({**pattern(["gdn"]), "pattern": ["kda"]}, "decoder.blocks has no 'kda'"),
        ({**pattern(["gdn"]), "pattern": []}, "decoder.pattern must list"),
        (stochastic(1, main="none"), "main_mixer_name 'none'"),
        (stochastic(1, {}), "has no mixers"),
        (stochastic(1, {"gdn": None}, "gdn"), "the mixers of layer 0 has no 'gdn' \\(got None"),
        (stochastic(1, {"a": stochastic(1)["block"]["mixer"]}), "inside a stochastic mixer"),
    ],
)
def test_what_a_decoder_cannot_be(decoder, message, tmp_path):
    with pytest.raises(VLLMValidationError, match=message):
        Harness(save(tmp_path, decoder, make_tensors(fixed(MIXERS["gdn"], 1))))


def test_tensors_that_do_not_fit(tmp_path):
    decoder = fixed(MIXERS["sliding_window"], 1)
    tensors = make_tensors(decoder)
    name = "model.decoder.blocks.0.mixer.k_proj"
    with pytest.raises(WeightsError, match="k_proj.bias: the config switches this bias off"):
        Harness(save(tmp_path / "a", decoder, tensors | {f"{name}.bias": torch.zeros(32)}))
    missing = {key: tensor for key, tensor in tensors.items() if key != f"{name}.weight"}
    with pytest.raises(WeightsError, match="missing: .*k_proj.weight"):
        Harness(save(tmp_path / "b", decoder, missing))


# ---- what the engine reads in the config ---------------------------------------------------------


def test_sizes_come_from_the_first_attention_that_any_layer_has(tmp_path):
    path = save(tmp_path / "a", stochastic(3, main="gdn"), {"lm_head.weight": torch.zeros(1)})
    arch = ModelConfig(model=str(path)).model_arch_config
    assert (arch.num_hidden_layers, arch.num_attention_heads, arch.num_kv_heads) == (3, 4, 2)
    assert (arch.head_size, arch.is_hybrid, arch.max_model_len) == (16, True, 4096)
    path = save(tmp_path / "b", fixed(MIXERS["kda"], 1), {})
    arch = ModelConfig(model=str(path)).model_arch_config
    assert (arch.num_attention_heads, arch.num_kv_heads, arch.is_hybrid) == (0, 0, True)
    path = save(tmp_path / "c", pattern(["attention", "sliding_window"]), {})
    assert not ModelConfig(model=str(path)).model_arch_config.is_hybrid


def test_our_config_goes_before_remote_code(tmp_path):
    path = save(tmp_path, fixed(MIXERS["kda"], 2), {})
    (path / "configuration_apriel2.py").write_text("raise RuntimeError('remote code was run')")
    config = get_config(path, trust_remote_code=True)
    assert config.num_hidden_layers == 2
    assert json.loads(config.to_json_string())["decoder"]["num_blocks"] == 2


def test_groups_are_kinds_of_state_never_layers(tmp_path):
    """12 attention, 1 gated delta net and 11 Kimi delta attention: 3 groups."""
    names = ["attention"] * 12 + ["gdn"] + ["kda"] * 11
    decoder = pattern(names)
    config = make_config(save(tmp_path, decoder, make_tensors(decoder)))
    layers = Harness(tmp_path, config=config).layers
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    groups = get_kv_cache_groups(config, specs)
    assert sorted(len(group.layer_names) for group in groups) == [1, 11, 12]


@pytest.mark.parametrize("mixer", MIXERS)
def test_what_a_window_keeps(mixer, tmp_path):
    """A window makes the state that of a window, and nothing else does."""
    decoder = pattern([mixer])
    config = make_config(save(tmp_path, decoder, make_tensors(decoder)))
    (layer,) = Harness(tmp_path, config=config).layers.values()
    kinds = {"attention": "full_attention", "sliding_window": "sliding_window"}
    spec = layer.get_kv_cache_spec(config)
    assert spec.kind == kinds.get(mixer, "mamba")
    assert spec.window == (WINDOW if mixer == "sliding_window" else None)


def test_a_supernet_keeps_state_for_the_mixers_in_use(tmp_path):
    """Layers of any placement are as many groups as kinds, and unused ones keep nothing."""
    path = save(tmp_path, stochastic(4), make_tensors(stochastic(4)))
    config = make_config(path)
    model = Harness(path, config=config).model
    for placement, sizes in (("all-gdn", [4]), ("every2nd-kda", [2, 2])):
        model.set_layer_placements(placement)
        layers = collect_layers(config, model)
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        assert [len(g.layer_names) for g in get_kv_cache_groups(config, specs)] == sizes
        planned = collect_layers(config, model, placement="all-attention")
        assert all(".attention." in name for name in planned) and len(planned) == 4
    before = model.get_layer_placements()
    with pytest.raises(VLLMValidationError, match="layer 1 has no mixer 'mamba'"):
        model.set_layer_placements(["gdn", "mamba", "gdn", "gdn"])
    assert model.get_layer_placements() == before
