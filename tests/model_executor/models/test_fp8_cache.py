# SPDX-License-Identifier: Apache-2.0
"""Models whose keys and values are kept in float8: specs, scales from the checkpoint, results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor

from tests.model_executor.harness import Chunk, Harness, make_config
from vllm import decisions
from vllm.config import CacheConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.kernels.cache.naive import write_rows
from vllm.kernels.fp8 import FP8, to_fp8
from vllm.kernels.rotary import naive as rotary
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

IDS = list(range(5, 45))


@pytest.fixture
def fp8_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference kernels keep float8 on the CPU, too."""
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", True)


def config_of(path: Path, dtype: str) -> VllmConfig:
    plain = make_config(path)
    cache: Any = CacheConfig(block_size=16, cache_dtype=dtype)  # type: ignore[arg-type]
    return resolve(
        VllmConfig(
            model_config=plain.model_config, cache_config=cache, load_config=plain.load_config
        )
    )


def harness(path: Path, dtype: str = "fp8") -> Harness:
    return Harness(path, config=config_of(path, dtype))


def with_scales(path: Path, target: Path, names: str, k: float, v: float) -> Path:
    """The checkpoint with a scale of keys and values per attention layer, under `names`."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    layers = {name.rpartition(".k_proj.")[0] for name in tensors if ".k_proj.weight" in name}
    for layer in layers:
        for kind, scale in (("k", k), ("v", v)):
            tensors[f"{layer}.{names.format(kind)}"] = torch.tensor(scale)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _distance(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def write_rounded(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor, **_: float) -> None:
    for i, rows in enumerate((key, value)):
        write_rows(to_fp8(rows).float(), kv_cache[:, i], slots)


@pytest.mark.parametrize("family", ["qwen3_sliding", "qwen3_5"])
def test_results_and_specs(fp8_caches: None, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The bits of a wide cache that holds what a float8 one would."""
    path = tiny_model(family)
    wide, narrow = Harness(path), harness(path)
    assert narrow.generate(IDS, 5, seq=1) == narrow.generate(IDS, 5, chunk_size=9, seq=2)
    exact, found = (h.logits([Chunk(0, 0, IDS)]) for h in (wide, narrow))
    assert _distance(found, exact) < 0.3
    monkeypatch.setattr(rotary, "write_kv_cache", write_rounded)
    assert torch.equal(found, wide.logits([Chunk(1, 0, IDS)])) and not torch.equal(found, exact)
    monkeypatch.undo()
    for name in narrow.layers:
        spec, other = (h.layers[name].get_kv_cache_spec(h.config) for h in (narrow, wide))
        if isinstance(spec, AttentionSpec):
            assert spec.dtype is FP8 and 4 * spec.page_size_bytes == other.page_size_bytes
        else:
            assert isinstance(spec, MambaSpec) and spec == other


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", "{}_scale"),
        ("llama", "{0}_proj.{0}_scale"),
        ("llama", "attn.{}_scale"),
        ("nemotron_h", "{0}_proj.{0}_scale"),
        ("nemotron_h", "{}_scale"),
    ],
)
def test_scales_from_the_checkpoint(
    fp8_caches: None, tmp_path: Path, family: str, names: str
) -> None:
    """Keys are written divided by their scale and read times it, values by theirs."""
    plain = harness(tiny_model(family))
    scaled = harness(with_scales(tiny_model(family), tmp_path / "m", names, 0.5, 4.0))
    logits = [h.logits([Chunk(0, 0, IDS)]) for h in (plain, scaled)]
    assert _distance(*logits) < 0.1
    # Of the first layer with keys and values, whose input is the same.
    caches = [[layer.kv_cache for layer in h.layers.values()] for h in (plain, scaled)]
    other, cache = (next(c for c in each if isinstance(c, Tensor)) for each in caches)
    keys, values = cache[1].float()
    torch.testing.assert_close(keys, other[1, 0].float() * 2, rtol=0.08, atol=0.01)
    torch.testing.assert_close(values, other[1, 1].float() / 4, rtol=0.08, atol=0.01)


def test_scales_of_a_16_bit_cache_are_not_loaded(tmp_path: Path) -> None:
    decisions.clear()
    path = with_scales(tiny_model("llama"), tmp_path / "m", "{}_scale", 0.5, 4.0)
    found, expected = (Harness(p).logits([Chunk(0, 0, IDS)]) for p in (path, tiny_model("llama")))
    assert torch.equal(found, expected)
    (record,) = [d for d in decisions.decisions() if "k_scale" in d.what]
    assert record.chosen == "not loaded" and "--kv-cache-dtype fp8" in record.why


def test_scales_come_back_after_memory_was_lost(fp8_caches: None, tmp_path: Path) -> None:
    """Sleeping leaves zeros; a checkpoint without scales must not."""
    model = harness(tiny_model("llama"))
    for param in model.model.parameters():
        param.data.zero_()
    loader = get_model_loader(model.config.load_config)
    with torch.no_grad():
        loader.fill(model.model, model.config.model_config)
    expected = harness(tiny_model("llama")).logits([Chunk(0, 0, IDS)])
    assert torch.equal(model.logits([Chunk(0, 0, IDS)]), expected)


def test_scales_must_be_positive(fp8_caches: None, tmp_path: Path) -> None:
    path = with_scales(tiny_model("llama"), tmp_path / "m", "{}_scale", 0.0, 4.0)
    with pytest.raises(ValueError, match="cache scales must be positive, found 0.0 and 4.0"):
        harness(path)


def test_devices_and_backends_without_it_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("llama")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'fp8' needs a CUDA device.*use auto"):
            harness(path)
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", True)
    from vllm.v1.attention.backends.paged import PagedAttentionBackend

    monkeypatch.setattr(PagedAttentionBackend, "supports_fp8_cache", False)
    with pytest.raises(ValueError, match="backend PAGED does not read a float8 cache"):
        harness(path)


@pytest.mark.parametrize(
    ("family", "on_the_device", "others"),
    [("llama", True, ", fp8"), ("llama", False, ""), ("deepseek_v3", True, "")],
)
def test_only_dtypes_that_are_read_are_named(
    monkeypatch: pytest.MonkeyPatch, family: str, on_the_device: bool, others: str
) -> None:
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", on_the_device)
    with pytest.raises(ValueError, match=f"supported: auto, float32{others}$"):
        harness(tiny_model(family), "bfloat16")
