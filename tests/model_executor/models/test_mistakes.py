# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a family's file are errors that say what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.harness import MAX_MODEL_LEN, Chunk, Harness
from tests.tiny_models import tiny_model
from vllm import ModelRegistry
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.self_attention import SelfAttention
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.llama import attention_shape
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp, head_dim, rotary
from vllm.model_executor.models.weights import WeightsError

NEW = "MistakenForCausalLM"


class Layer(DecoderLayer):
    """Llama's, but for a mixer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rope = rotary(vllm_config, head_dim(config))
        name = f"{prefix}.self_attn" if prefix else ""
        self.self_attn = SelfAttention(attention_shape(config), rope, name)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")


class WithMixer(Layer):
    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(positions, hidden_states)


class WithTuple(Layer):
    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(positions, hidden_states), None  # type: ignore[return-value]


class WithPlain(nn.Module):
    """A layer's modules, and no `DecoderLayer`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        for name, module in Layer(vllm_config, prefix).named_children():
            self.add_module(name, module)


def without_prefix(vllm_config: VllmConfig, prefix: str) -> nn.Module:
    return WithMixer(vllm_config)


def by_function(vllm_config: VllmConfig, prefix: str) -> nn.Module:
    return WithMixer(vllm_config, prefix)


def harness(
    path: Path,
    layer: Callable[..., nn.Module],
    attributes: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Harness:
    """A model of such layers, of a class with such `attributes`, with weights of Llama's."""
    data = {"layer_class": layer, **attributes}
    ModelRegistry.register_model(NEW, type(NEW, (DecoderForCausalLM,), data))
    model = ModelConfig(
        model=str(path),
        dtype=torch.float32,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        hf_overrides={"architectures": [NEW]},
        **fields,
    )
    return Harness(path, config=resolve(VllmConfig(model_config=model, load_config=LoadConfig())))


@pytest.fixture
def path() -> Path:
    return tiny_model("llama")


def test_a_function_may_make_the_layers(path: Path) -> None:
    """As it is: called on the class, it gets no `self`."""
    assert harness(path, by_function).logits([Chunk(0, 0, [1, 2, 3])]).isfinite().all()


def test_a_layer_without_mixer(path: Path) -> None:
    built = harness(path, Layer)
    with pytest.raises(NotImplementedError, match="Layer gives neither `mix` nor `mix_stream`"):
        built.logits([Chunk(0, 0, [1, 2, 3])])


def test_a_mixer_that_returns_a_pair(path: Path) -> None:
    """As `o_proj` does, `(output, bias)`."""
    built = harness(path, WithTuple)
    with pytest.raises(TypeError, match=r"WithTuple\.mix returned a tuple.*a tensor"):
        built.logits([Chunk(0, 0, [1, 2, 3])])


def test_layers_of_another_frame(path: Path) -> None:
    built = harness(path, WithPlain)
    with pytest.raises(TypeError, match=r"layer 0 is a WithPlain.*DecoderLayer.*model_class"):
        built.logits([Chunk(0, 0, [1, 2, 3])])


def test_layers_without_names(path: Path) -> None:
    with pytest.raises(ValueError, match=r"two layers .* named '\.attn'.*its own `prefix`"):
        harness(path, without_prefix)


class Unquantised(WithMixer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        config = vllm_config.model_config.hf_text_config
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)


def test_a_model_that_ignores_quantisation(path: Path) -> None:
    """Its weights would stay as they are, and nobody would know."""
    with pytest.raises(VLLMValidationError, match=f"fp8.*{NEW}.*quant_config"):
        harness(path, Unquantised, quantization="fp8")
    assert (
        harness(path, WithMixer, quantization="fp8").logits([Chunk(0, 0, [1, 2])]).isfinite().all()
    )


class OddHeads(WithMixer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        config = vllm_config.model_config.hf_text_config
        SelfAttention(
            replace(attention_shape(config), num_kv_heads=3),
            rotary(vllm_config, head_dim(config)),
            f"{prefix}.other",
        )


def test_a_layer_that_cannot_be_built_is_named(path: Path) -> None:
    with pytest.raises(VLLMValidationError, match=r"^model\.layers\.0: 4 query heads for 3") as e:
        harness(path, OddHeads)
    assert (e.value.message, e.value.parameter) == (str(e.value), "model")


class Narrow(WithMixer):
    """Its second layer's mixer gets too few columns."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.lost = extract_layer_index(prefix)

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        width = hidden_states.shape[1] - self.lost
        return super().mix(positions, hidden_states[:, :width].contiguous())


def test_a_layer_whose_shapes_disagree_is_named(path: Path) -> None:
    """The kernel that refuses the tensors has no name to say."""
    built = harness(path, Narrow)
    with pytest.raises(RuntimeError, match=r"^model\.layers\.1\.self_attn\.qkv_proj: "):
        built.logits([Chunk(0, 0, [1, 2, 3])])


def test_a_shard_that_the_parameter_has_not(path: Path) -> None:
    fused = [*DecoderForCausalLM.fused_names[:4], ("gate_up_proj", "up_proj", 2)]
    wrong = r"wrong shard: model\.layers\.0\.mlp\.up_proj\.weight: given as shard 2 .*\[0, 1\]; see"
    with pytest.raises(WeightsError, match=wrong):
        harness(path, WithMixer, {"fused_names": fused})
