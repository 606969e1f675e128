# SPDX-License-Identifier: Apache-2.0
"""The models of `benchmarks/`: sizes without weights, served as `benchmarks.offline` does."""

from __future__ import annotations

import pytest

from benchmarks.offline import _MODEL, default_settings
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_outline import outline_model
from vllm.v1.kv_cache_interface import MambaSpec


@pytest.mark.parametrize(
    ("name", "billions", "recurrent", "attention"),
    [
        ("qwen3_5_4b", 4.2, 24, 8),
        ("qwen3_5_9b", 9.0, 24, 8),
        ("qwen3_8b", 9.0, 0, 36),
    ],
)
def test_sizes(name: str, billions: float, recurrent: int, attention: int) -> None:
    model = str(_MODEL.with_name(name))
    config = EngineArgs(**default_settings() | {"model": model}).create_engine_config()
    outline = outline_model(config)
    assert outline.weight_bytes / 2 == pytest.approx(billions * 1e9, rel=0.02)
    kinds = [isinstance(spec, MambaSpec) for spec in outline.specs.values()]
    assert (sum(kinds), len(kinds) - sum(kinds)) == (recurrent, attention)
