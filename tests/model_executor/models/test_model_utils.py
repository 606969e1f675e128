# SPDX-License-Identifier: Apache-2.0
"""Names, layer ranges, intermediates, and config fields with other values than are served."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_configs import CONFIGS
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models import kimi_linear
from vllm.model_executor.models.utils import (
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    rotary,
)
from vllm.model_executor.utils import get_weight_attr, set_weight_attrs


def test_names() -> None:
    assert maybe_prefix("model", "norm") == "model.norm"
    assert maybe_prefix("", "norm") == "norm"
    assert extract_layer_index("model.layers.12.mlp") == 12
    for name in ("model.norm", "model.layers.1.experts.2"):
        with pytest.raises(ValueError, match="exactly one number"):
            extract_layer_index(name)


def test_layers_are_built_by_name() -> None:
    names: list[str] = []

    def build(prefix: str) -> nn.Module:
        names.append(prefix)
        return nn.Identity()

    start, end, layers = make_layers(3, build, prefix="model.layers")
    assert (start, end, len(layers)) == (0, 3, 3)
    assert names == ["model.layers.0", "model.layers.1", "model.layers.2"]


def test_empty_intermediates() -> None:
    make = make_empty_intermediate_tensors_factory(["hidden_states", "residual"], 6)
    made = make(4, torch.bfloat16, torch.device("cpu"))
    assert len(made) == 2
    assert made["residual"].shape == (4, 6) and made["residual"].dtype == torch.bfloat16


def test_weight_attributes_are_set_once() -> None:
    weight = nn.Parameter(torch.zeros(1))
    set_weight_attrs(weight, {"dummy_range": (0.0, 1.0)})
    assert get_weight_attr(weight, "dummy_range", None) == (0.0, 1.0)
    assert get_weight_attr(weight, "weight_loader", "default") == "default"
    with pytest.raises(ValueError, match="already has the attribute 'dummy_range'"):
        set_weight_attrs(weight, {"dummy_range": (0.0, 2.0)})


def test_rotation_of_a_part_is_for_families_that_have_it() -> None:
    """transformers' Llama turns all of a head whatever the config says."""
    text = SimpleNamespace(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
    config.model_config.max_model_len = 16
    with pytest.raises(VLLMValidationError, match=r"partial_rotary_factor 0\.5 is not supported"):
        rotary(config, 32)
    assert rotary(config, 32, may_be_partial=True).rotary_dim == 16
    text.rope_parameters["partial_rotary_factor"] = 1.0
    assert rotary(config, 32).rotary_dim == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_router_activation_func", "softmax"), ("mla_use_nope", False), ("moe_layer_freq", 2)],
)
def test_other_kimi_linear_models_are_refused(field: str, value: Any) -> None:
    config = CONFIGS["kimi_linear"]()
    kimi_linear.check(config)
    setattr(config, field, value)
    with pytest.raises(VLLMValidationError, match=f"{field} {value!r} is not supported"):
        kimi_linear.check(config)
