# SPDX-License-Identifier: Apache-2.0
"""What a model cannot do on several workers is refused as the configuration is made."""

from __future__ import annotations

import pytest

from tests.tiny_configs import FAMILIES
from tests.tiny_models import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.moe import has_mixtures
from vllm.model_executor.model_outline import models_on_meta


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}])
def test_a_model_without_experts_has_none_to_spread(llama: str, sizes: dict[str, int]) -> None:
    given = {f"{kind}_parallel_size": size for kind, size in sizes.items()}
    with pytest.raises(VLLMValidationError, match=r"the model has no experts .*; leave it out"):
        EngineArgs(llama, enable_expert_parallel=True, **given).create_engine_config()


def test_experts_that_no_layer_has_are_not_to_spread() -> None:
    """A dense Nemotron-H's config states some."""
    args = EngineArgs(str(tiny_model("nemotron_h")), enable_expert_parallel=True)
    with pytest.raises(VLLMValidationError, match=r"the model has no experts .*; leave it out"):
        args.create_engine_config()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_experts_is_known_to_have_some(family: str) -> None:
    config = EngineArgs(str(tiny_model(family))).create_engine_config()
    _, (model, *_) = models_on_meta(config)
    assert config.model_config is not None
    assert config.model_config.has_experts == has_mixtures(model)
