# SPDX-License-Identifier: Apache-2.0
"""How recurrent layers keep their state: its dtype, deferred commits, split prefills."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.config.checkpoints import HYBRID, TRANSFER, extraction, write_config
from tests.engine.decision_records import record
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.engine.resolve import resolve
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform


@pytest.mark.parametrize(
    ("stated", "given", "result"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        (None, "auto", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_recurrent_state_dtype(tmp_path: Path, stated: str | None, given: Any, result: str) -> None:
    text = {**HYBRID["text_config"], "mamba_ssm_dtype": stated}  # type: ignore[dict-item]
    if stated is None:
        del text["mamba_ssm_dtype"]
    model = ModelConfig(write_config(tmp_path, "hybrid", text_config=text))
    cache = CacheConfig(mamba_ssm_cache_dtype=given)
    config = resolve(VllmConfig(model_config=model, cache_config=cache))
    assert config.cache_config.mamba_ssm_cache_dtype == result
    assert (record(config, "mamba_ssm_cache_dtype") is not None) == (given == "auto")


def test_dense_model_has_no_recurrent_dtype(llama: str) -> None:
    config = resolve(VllmConfig(model_config=ModelConfig(llama)))
    assert config.cache_config.mamba_ssm_cache_dtype == "auto"


@pytest.mark.parametrize("converts", [True, False])
def test_convolution_state_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converts: bool
) -> None:
    """Kernels that cannot convert it are found out at the start, not in the first step."""
    monkeypatch.setattr(type(current_platform), "converts_conv_state", converts)
    model = ModelConfig(write_config(tmp_path, "hybrid"), dtype="bfloat16")
    for same in ("auto", "bfloat16"):
        resolve(VllmConfig(model_config=model, cache_config=CacheConfig(mamba_cache_dtype=same)))  # type: ignore[arg-type]
    other = CacheConfig(mamba_cache_dtype="float32")
    if converts:
        resolve(VllmConfig(model_config=model, cache_config=other))
        return
    with pytest.raises(VLLMValidationError, match="--mamba-cache-dtype float32.*bfloat16; leave"):
        resolve(VllmConfig(model_config=model, cache_config=other))


@pytest.fixture
def defers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform whose decode kernels keep a ring."""
    monkeypatch.setattr(type(current_platform), "defers_commit", True)


@pytest.mark.usefixtures("defers")
@pytest.mark.parametrize(("asked", "chosen"), [(None, 6), (3, 3), (16, 16), (1, 1)])
def test_deferred_commit(tmp_path: Path, asked: int | None, chosen: int) -> None:
    cache = CacheConfig(deferred_commit_tokens=asked)
    config = resolve(
        VllmConfig(model_config=ModelConfig(write_config(tmp_path, "hybrid")), cache_config=cache)
    )
    assert cache.commit_interval == chosen
    decision = record(config, "deferred commit")
    assert decision is not None
    assert decision.chosen == (f"every {chosen} tokens" if chosen > 1 else "off")


@pytest.mark.usefixtures("defers")
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sanitize": True}, "--sanitize"),
        ({"platform": False}, "cpu kernels write it with every token"),
    ],
)
def test_who_forbids_deferred_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(type(current_platform), "defers_commit", settings.get("platform", True))
    cache = CacheConfig(deferred_commit_tokens=4, sanitize=settings.get("sanitize", False))
    config = resolve(
        VllmConfig(
            model_config=ModelConfig(write_config(tmp_path, "hybrid")),
            cache_config=cache,
        )
    )
    decision = record(config, "deferred commit")
    assert cache.commit_interval == 1 and decision is not None
    assert decision.chosen == "off" and why in decision.why and decision.instead_of == "4"


@pytest.mark.usefixtures("defers")
def test_a_connector_leaves_deferred_commit_on(tmp_path: Path) -> None:
    config = resolve(
        VllmConfig(
            model_config=ModelConfig(write_config(tmp_path, "hybrid")),
            kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        )
    )
    assert config.cache_config.commit_interval == 6


@pytest.mark.usefixtures("defers")
def test_extraction_leaves_deferred_commit_on(tmp_path: Path) -> None:
    model = ModelConfig(write_config(tmp_path, "hybrid"))
    config = resolve(
        VllmConfig(
            model_config=model,
            speculative_config=extraction(model),
            kv_transfer_config=KVTransferConfig(**TRANSFER),  # type: ignore[arg-type]
        )
    )
    assert config.cache_config.commit_interval == 6


@pytest.mark.parametrize(
    ("asked", "caching", "splits", "why"),
    [
        ("auto", False, True, "few long prompts"),
        ("auto", True, False, "prefix caching promises the bits"),
        ("on", True, True, "few long prompts"),
        ("off", False, False, "--recurrent-prefill-split off"),
    ],
)
def test_recurrent_prefill_split(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: Literal["auto", "on", "off"],
    caching: bool,
    splits: bool,
    why: str,
) -> None:
    monkeypatch.setattr(type(current_platform), "splits_scans", True)
    cache = CacheConfig(recurrent_prefill_split=asked, enable_prefix_caching=caching)
    config = resolve(
        VllmConfig(model_config=ModelConfig(write_config(tmp_path, "hybrid")), cache_config=cache)
    )
    decision = record(config, "recurrent prefill split")
    assert cache.splits_scans == splits and decision is not None
    assert decision.chosen == ("on" if splits else "off") and why in decision.why
    assert decision.instead_of is None


def test_a_platform_that_cannot_split_says_so(tmp_path: Path) -> None:
    cache = CacheConfig(recurrent_prefill_split="on")
    config = resolve(
        VllmConfig(model_config=ModelConfig(write_config(tmp_path, "hybrid")), cache_config=cache)
    )
    decision = record(config, "recurrent prefill split")
    assert not cache.splits_scans and decision is not None
    assert (decision.chosen, decision.instead_of) == ("off", "on")
    assert "cpu kernels scan whole sequences" in decision.why


def test_a_model_without_recurrent_layers_defers_nothing(tmp_path: Path) -> None:
    config = resolve(VllmConfig(model_config=ModelConfig(write_config(tmp_path))))
    assert config.cache_config.commit_interval == 1
    assert record(config, "deferred commit") is None
