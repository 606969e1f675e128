# SPDX-License-Identifier: Apache-2.0
"""VllmConfig, its parts, and the current config."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.config.checkpoints import extraction, write_config
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    KVTransferConfig,
    ModelConfig,
    VllmConfig,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from vllm.config.compilation import default_capture_sizes, default_piecewise_sizes
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

TRANSFER = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}


def test_length_and_window_are_adopted(tmp_path: Path) -> None:
    path = write_config(tmp_path, sliding_window=64, layer_types=["sliding_attention"] * 4)
    config = VllmConfig(model_config=ModelConfig(path, max_model_len=128))
    assert config.scheduler_config.max_model_len == 128
    assert config.cache_config.sliding_window == 64


def test_default_capture_sizes() -> None:
    assert default_capture_sizes(3) == [1, 2, 3]
    sizes = default_capture_sizes(512)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-1] == 512 and len(sizes) == 34
    assert all(b - a <= max(8, a // 6) for a, b in zip(sizes, sizes[1:], strict=False))


def test_default_piecewise_sizes() -> None:
    assert default_piecewise_sizes(5) == [5]
    assert default_piecewise_sizes(100) == [8, 16, 32, 64, 100]
    sizes = default_piecewise_sizes(2048)
    assert sizes[-1] == 2048 and len(sizes) == 22
    assert all(b - a <= 128 for a, b in zip(sizes, sizes[1:], strict=False))
    # Padding beyond what the weights' transfer hides stays below a third.
    wide = [size for size in sizes if size >= 128]
    assert all(b / a <= 1.5 for a, b in zip(wide, wide[1:], strict=False))


def test_graph_mode_facts() -> None:
    full = CUDAGraphMode.FULL_AND_PIECEWISE
    assert full.decode_is_full and full.mixed_is_piecewise and not full.mixed_is_full
    assert CUDAGraphMode.FULL_DECODE_ONLY.decode_is_full
    assert not CUDAGraphMode.FULL_DECODE_ONLY.mixed_is_piecewise
    assert not CUDAGraphMode.NONE.uses_graphs


@pytest.mark.parametrize("mode", [3, "3", "VLLM_COMPILE", "vllm_compile", CompilationMode(3)])
def test_compile_mode_spellings(mode: Any) -> None:
    assert CompilationConfig(mode=mode).mode is CompilationMode.VLLM_COMPILE


def test_attention_backend_has_two_spellings() -> None:
    assert VllmConfig().attention_backend is None
    config = VllmConfig(attention_config=AttentionConfig(backend="PAGED"))
    assert config.attention_backend == "PAGED"
    VllmConfig(attention_config=AttentionConfig(backend="PAGED"), attention_backend="PAGED")
    with pytest.raises(VLLMValidationError, match="PAGED and --attention-config backend X differ"):
        VllmConfig(attention_config=AttentionConfig(backend="X"), attention_backend="PAGED")


def test_pickles(hybrid: str) -> None:
    model = ModelConfig(hybrid)
    config = VllmConfig(
        model_config=model,
        speculative_config=extraction(model),
        kv_transfer_config={  # type: ignore[arg-type]
            **TRANSFER,
            "kv_connector_extra_config": {"shared_storage_path": Path("/x")},
        },
    )
    twin = pickle.loads(pickle.dumps(config))
    assert twin.instance_id == config.instance_id
    assert twin.kv_transfer_config.engine_id == config.kv_transfer_config.engine_id
    extra = twin.kv_transfer_config.get_from_extra_config("shared_storage_path", None)
    assert extra == Path("/x")
    assert twin.speculative_config.extraction_layer_ids == [1, 4]


def test_kv_transfer_roles() -> None:
    def make(role: Any) -> KVTransferConfig:
        return KVTransferConfig(kv_connector="X", kv_role=role)

    assert make("kv_producer").is_kv_producer and not make("kv_producer").is_kv_consumer
    assert make("kv_consumer").is_kv_consumer and not make("kv_consumer").is_kv_producer
    assert make("kv_both").is_kv_consumer and make("kv_both").is_kv_producer
    assert not KVTransferConfig().is_kv_transfer_instance
    assert make("kv_both").engine_id != make("kv_both").engine_id
    assert make("kv_both").kv_buffer_device == current_platform.device_type


def test_current_config() -> None:
    assert get_current_vllm_config_or_none() is None
    with pytest.raises(RuntimeError, match="set_current_vllm_config"):
        get_current_vllm_config()
    outer, inner = VllmConfig(), VllmConfig()
    with set_current_vllm_config(outer):
        with pytest.raises(KeyError), set_current_vllm_config(inner):
            assert get_current_vllm_config() is inner
            raise KeyError
        assert get_current_vllm_config() is outer
    assert get_current_vllm_config_or_none() is None


def test_layers_by_type_and_name() -> None:
    config = VllmConfig()
    config.compilation_config.static_forward_context.update({"a": 1, "b": "x", "c": 2})
    assert get_layers_from_vllm_config(config, int) == {"a": 1, "c": 2}
    assert get_layers_from_vllm_config(config, int, ["c", "b"]) == {"c": 2}
    with pytest.raises(KeyError):
        get_layers_from_vllm_config(config, int, ["z"])


@pytest.mark.parametrize("tokens", [0, -1, 17])
def test_unusable_deferred_commit(tokens: int) -> None:
    with pytest.raises(VLLMValidationError, match="--deferred-commit-tokens.: input should be"):
        CacheConfig(deferred_commit_tokens=tokens)
