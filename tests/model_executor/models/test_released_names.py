# SPDX-License-Identifier: Apache-2.0
"""Names and shapes in released checkpoints, written down.

Other tests load what transformers saves, whose names follow from inverting its own mapping. These
differ from released ones where the mapping is not one to one: the dense layer of Kimi-Linear is
saved as `block_sparse_moe` instead of `mlp`, and a norm of OLMo's attention layers as
`feedforward_layer_norm` instead of `post_attention_layernorm`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tests.model_executor.harness import make_config
from tests.tiny_models import tiny_model
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models.weights import WeightsError

Shapes = Mapping[str, tuple[int, ...]]

HIDDEN, VOCAB = 64, 260


def weights(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """`NAME.weight`, of linear layers and norms, with `__` for a dot."""
    return {f"{name.replace('__', '.')}.weight": shape for name, shape in shapes.items()}


def under(prefix: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def layers(prefix: str, *each: Shapes) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{i}.{name}": shape
        for i, shapes in enumerate(each)
        for name, shape in shapes.items()
    }


def mamba2(groups: int) -> dict[str, tuple[int, ...]]:
    """8 heads of 16, states of 16."""
    channels = 128 + 2 * groups * 16
    return {
        "A_log": (8,),
        "D": (8,),
        "dt_bias": (8,),
        "conv1d.bias": (channels,),
        **weights(
            conv1d=(channels, 1, 4), in_proj=(128 + channels + 8, HIDDEN), out_proj=(HIDDEN, 128)
        ),
    }


ATTENTION_16 = weights(
    q_proj=(64, HIDDEN), k_proj=(32, HIDDEN), v_proj=(32, HIDDEN), o_proj=(HIDDEN, 64)
)
MLP = weights(gate_proj=(96, HIDDEN), up_proj=(96, HIDDEN), down_proj=(HIDDEN, 96))
OUTSIDE = weights(
    model__embed_tokens=(VOCAB, HIDDEN), model__norm=(HIDDEN,), lm_head=(VOCAB, HIDDEN)
)


def nemotron_h() -> Shapes:
    norm, channel_norm = weights(norm=(HIDDEN,)), weights(norm=(128,))
    mamba = norm | under("mixer", mamba2(groups=2) | channel_norm)
    expert = weights(up_proj=(32, HIDDEN), down_proj=(HIDDEN, 32))
    shared = weights(shared_experts__up_proj=(48, HIDDEN), shared_experts__down_proj=(HIDDEN, 48))
    router = {"gate.weight": (8, HIDDEN), "gate.e_score_correction_bias": (8,)}
    moe = norm | under("mixer", layers("experts", *[expert] * 8) | shared | router)
    mlp = norm | under("mixer", weights(up_proj=(96, HIDDEN), down_proj=(HIDDEN, 96)))
    attention = norm | under("mixer", ATTENTION_16)
    outside = weights(
        backbone__embeddings=(VOCAB, HIDDEN), backbone__norm_f=(HIDDEN,), lm_head=(VOCAB, HIDDEN)
    )
    return outside | layers("backbone.layers", mamba, moe, mlp, attention, mamba)


def granite_h() -> Shapes:
    both = weights(
        input_layernorm=(HIDDEN,),
        post_attention_layernorm=(HIDDEN,),
        block_sparse_moe__input_linear=(8, 2 * 32, HIDDEN),
        block_sparse_moe__output_linear=(8, HIDDEN, 32),
        block_sparse_moe__router__layer=(8, HIDDEN),
        shared_mlp__input_linear=(2 * 48, HIDDEN),
        shared_mlp__output_linear=(HIDDEN, 48),
    )
    mamba = both | under("mamba", mamba2(groups=1) | weights(norm=(128,)))
    attention = both | under("self_attn", ATTENTION_16)
    return OUTSIDE | layers("model.layers", mamba, attention, mamba, mamba)


def olmo_hybrid() -> Shapes:
    delta = {"A_log": (4,), "dt_bias": (4,)} | weights(
        q_proj=(48, HIDDEN), k_proj=(48, HIDDEN), v_proj=(96, HIDDEN), g_proj=(96, HIDDEN),
        a_proj=(4, HIDDEN), b_proj=(4, HIDDEN), o_proj=(HIDDEN, 96), o_norm=(24,),
        q_conv1d=(48, 1, 4), k_conv1d=(48, 1, 4), v_conv1d=(96, 1, 4),
    )  # fmt: skip
    linear = weights(attention_layer_norm=(HIDDEN,), feedforward_layer_norm=(HIDDEN,))
    linear |= under("linear_attn", delta) | under("mlp", MLP)
    norms = weights(q_norm=(64,), k_norm=(32,))
    full = weights(post_attention_layernorm=(HIDDEN,), post_feedforward_layernorm=(HIDDEN,))
    full |= under("self_attn", ATTENTION_16 | norms) | under("mlp", MLP)
    return OUTSIDE | layers("model.layers", linear, linear, linear, full)


def falcon_h1() -> Shapes:
    layer = weights(input_layernorm=(HIDDEN,), pre_ff_layernorm=(HIDDEN,))
    layer |= under("mamba", mamba2(groups=1)) | under("self_attn", ATTENTION_16)
    layer |= under("feed_forward", MLP)
    outside = {name: shape for name, shape in OUTSIDE.items() if name != "model.norm.weight"}
    outside |= weights(model__final_layernorm=(HIDDEN,))
    return outside | layers("model.layers", *[layer] * 4)


def kimi_linear() -> Shapes:
    delta = {"A_log": (1, 1, 4, 1), "dt_bias": (64,)} | weights(
        q_proj=(64, HIDDEN), k_proj=(64, HIDDEN), v_proj=(64, HIDDEN), o_proj=(HIDDEN, 64),
        q_conv1d=(64, 1, 4), k_conv1d=(64, 1, 4), v_conv1d=(64, 1, 4), o_norm=(16,),
        f_a_proj=(16, HIDDEN), f_b_proj=(64, 16), g_a_proj=(16, HIDDEN), g_b_proj=(64, 16),
        b_proj=(4, HIDDEN),
    )  # fmt: skip
    latent = weights(
        q_proj=(4 * 24, HIDDEN), kv_a_proj_with_mqa=(32 + 8, HIDDEN), kv_a_layernorm=(32,),
        kv_b_proj=(4 * 32, 32), o_proj=(HIDDEN, 64),
    )  # fmt: skip
    expert = weights(w1=(32, HIDDEN), w2=(HIDDEN, 32), w3=(32, HIDDEN))
    shared = weights(gate_proj=(32, HIDDEN), up_proj=(32, HIDDEN), down_proj=(HIDDEN, 32))
    mixture = layers("experts", *[expert] * 8) | under("shared_experts", shared)
    mixture |= {"gate.weight": (8, HIDDEN), "gate.e_score_correction_bias": (8,)}
    norms = weights(input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))
    dense = norms | under("self_attn", delta) | under("mlp", MLP)
    sparse = norms | under("block_sparse_moe", mixture)
    recurrent, full = (sparse | under("self_attn", mixer) for mixer in (delta, latent))
    return OUTSIDE | layers("model.layers", dense, full, recurrent, full)


RELEASED = {
    "nemotron_h_moe": nemotron_h,
    "granite_h": granite_h,
    "olmo_hybrid": olmo_hybrid,
    "falcon_h1": falcon_h1,
    "kimi_linear": kimi_linear,
}


def empty_model(family: str) -> nn.Module:
    """With NaN for every parameter."""
    config = make_config(tiny_model(family))
    model = get_model_loader(config.load_config).build_model(config, config.model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return model


@pytest.mark.parametrize("family", RELEASED)
@torch.no_grad()
def test_released_names_fill_every_parameter(family: str) -> None:
    model = empty_model(family)
    released = [(name, torch.rand(shape)) for name, shape in RELEASED[family]().items()]
    loaded = model.load_weights(released)
    assert loaded == {name for name, _ in model.named_parameters()}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("family", RELEASED)
@torch.no_grad()
def test_every_released_name_is_needed(family: str) -> None:
    """None of them is passed over: without it, a parameter is not full."""
    released = {name: torch.rand(shape) for name, shape in RELEASED[family]().items()}
    left_out = list(released)[:: max(1, len(released) // 6)]
    with pytest.raises(WeightsError) as caught:
        empty_model(family).load_weights(
            (name, tensor) for name, tensor in released.items() if name not in left_out
        )
    assert len(caught.value.problems) == len(left_out)
    assert all(problem.startswith("missing: ") for problem in caught.value.problems)
