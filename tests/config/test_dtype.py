# SPDX-License-Identifier: Apache-2.0
"""The dtype of a checkpoint, from its config or its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.config.checkpoints import write_config
from vllm.config.model_rules import checkpoint_dtype, safetensors_dtype
from vllm.transformers_utils.config import get_config
from vllm.utils.torch_utils import (
    dtype_from_name,
    dtype_name,
    get_kv_cache_torch_dtype,
    set_default_torch_dtype,
)


def test_most_common_float_dtype(tmp_path: Path) -> None:
    assert safetensors_dtype(tmp_path) is None
    tensors = {
        "a": torch.zeros(1, dtype=torch.bfloat16),
        "b": torch.zeros(1, dtype=torch.bfloat16),
        "c": torch.zeros(1),
        **{f"i{i}": torch.zeros(1, dtype=torch.int64) for i in range(5)},
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert safetensors_dtype(tmp_path) is torch.bfloat16


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"xx"])
def test_damaged_headers(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert safetensors_dtype(tmp_path) is None


def test_config_is_stronger_than_the_weights(tmp_path: Path) -> None:
    path = write_config(tmp_path, dtype="float16")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = get_config(path)
    assert checkpoint_dtype(path, config, config) is torch.float16


def test_names() -> None:
    assert dtype_from_name("half") is torch.float16
    assert dtype_from_name("torch.bfloat16") is torch.bfloat16
    assert dtype_from_name(torch.float32) is torch.float32
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(ValueError, match="unknown dtype 'int8'; known: half"):
        dtype_from_name("int8")


def test_kv_cache_dtype() -> None:
    assert get_kv_cache_torch_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert get_kv_cache_torch_dtype("auto", "float16") is torch.float16
    assert get_kv_cache_torch_dtype("float32", torch.bfloat16) is torch.float32
    with pytest.raises(ValueError, match="needs the model's dtype"):
        get_kv_cache_torch_dtype("auto")


def test_default_dtype_is_restored() -> None:
    before = torch.get_default_dtype()
    with pytest.raises(KeyError), set_default_torch_dtype(torch.float64):
        assert torch.get_default_dtype() is torch.float64
        raise KeyError
    assert torch.get_default_dtype() is before


def test_custom_ops() -> None:
    from vllm.utils.torch_utils import direct_register_custom_op

    def twice_for_test(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    direct_register_custom_op("twice_for_test", twice_for_test, fake_impl=fake)
    assert torch.ops.vllm.twice_for_test(torch.ones(2)).tolist() == [2.0, 2.0]
