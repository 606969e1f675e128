# SPDX-License-Identifier: Apache-2.0
"""Choices that follow from several configs, the device and the connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.checkpoints import TRANSFER, extraction, write_config
from tests.engine.decision_records import record
from vllm import decisions
from vllm.config import KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.engine.resolve import check_architecture, resolve, resolve_hybrid_manager
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine


def test_what_is_not_served_of_a_generation_config_is_recorded_at_the_start(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [7]}')
    found = record(resolve(VllmConfig(model_config=ModelConfig(path))), "generation config")
    assert found is not None and found.instead_of == "suppress_tokens: [7]"


def test_extraction_needs_a_connector(llama: str) -> None:
    model = ModelConfig(llama)
    with pytest.raises(VLLMValidationError, match="needs --kv-transfer-config"):
        resolve(VllmConfig(model_config=model, speculative_config=extraction(model)))


def test_extraction_raises_the_token_budget(llama: str) -> None:
    model = ModelConfig(llama)
    config = resolve(
        VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(max_num_seqs=10, max_num_batched_tokens=15),
            speculative_config=extraction(model),
            kv_transfer_config=TRANSFER,  # type: ignore[arg-type]
        )
    )
    assert config.scheduler_config.max_num_batched_tokens == 20
    made = record(config, "max_num_batched_tokens")
    assert made is not None and (made.chosen, made.instead_of) == ("20", "15")


def test_hybrid_models_need_several_geometries(hybrid: str) -> None:
    scheduler = SchedulerConfig(disable_hybrid_kv_cache_manager=True)
    with pytest.raises(VLLMValidationError, match="--disable-hybrid-kv-cache-manager"):
        resolve(VllmConfig(model_config=ModelConfig(hybrid), scheduler_config=scheduler))


@pytest.mark.parametrize(
    ("disable", "connector", "capable", "result"),
    [
        (None, None, False, False),
        (None, "X", True, False),
        (None, "X", False, True),
        (False, None, False, False),
        (False, "X", True, False),
        (False, "X", False, ValueError),
        (True, None, True, True),
        (True, "X", True, True),
        (True, "X", False, True),
    ],
)
def test_hybrid_manager_table(
    disable: bool | None, connector: str | None, capable: bool, result: Any
) -> None:
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    if result is ValueError:
        with pytest.raises(VLLMValidationError, match="--no-disable-hybrid.*connector X"):
            resolve_hybrid_manager(disable, transfer, lambda t: capable)
        return
    assert resolve_hybrid_manager(disable, transfer, lambda t: capable) is result
    automatic = disable is None and result
    made = [decision.what for decision in decisions.decisions()]
    assert made == ["hybrid_kv_cache_manager"] * automatic


def test_model_family_rules_are_applied(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import config as model_rules

    seen = []

    class Rules(model_rules.VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            seen.append(vllm_config)

    monkeypatch.setitem(model_rules.MODELS_CONFIG_MAP, "LlamaForCausalLM", Rules)
    config = resolve(VllmConfig(model_config=ModelConfig(llama)))
    assert seen == [config]


def test_quantisation_comes_from_the_checkpoint_or_the_flag(tmp_path: Path, llama: str) -> None:
    def resolved(path: str, asked: str | None = None) -> str | None:
        model = resolve(VllmConfig(model_config=ModelConfig(path, quantization=asked))).model_config
        return model.quantization

    path = write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    assert resolved(path) == "fp8"
    assert resolved(llama, "fp8") == "fp8"
    assert resolved(llama) is None
    with pytest.raises(
        VLLMValidationError, match="awq: not supported.*checkpoints: fp8.*load: fp8"
    ):
        resolved(llama, "awq")
    with pytest.raises(VLLMValidationError, match="--quantization awq.*quantised as fp8"):
        resolved(path, "awq")
    stored = {"quant_method": "gptq"}
    with pytest.raises(VLLMValidationError, match="--quantization gptq: not supported"):
        resolved(write_config(tmp_path, quantization_config=stored))
    with pytest.raises(VLLMValidationError, match="quantization_config .*names no quant_method"):
        resolved(write_config(tmp_path, quantization_config={"bits": 4}))


def test_mxfp4_is_served_of_families_that_dequantise_it(tmp_path: Path) -> None:
    """Others ended in a list of surplus tensors."""
    path = write_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(
        VLLMValidationError,
        match=r"mxfp4: not supported for LlamaForCausalLM; supported for GptOssForCausalLM; serve "
        "a checkpoint in 16 bits or float8",
    ):
        resolve(VllmConfig(model_config=ModelConfig(path)))


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    unknown = ModelConfig(write_config(tmp_path, architectures=["Foo"]))
    with pytest.raises(VLLMValidationError, match="Foo.*supported: .*LlamaForCausalLM, .*Qwen3"):
        check_architecture(unknown)
    for wrong in ("LlamaForCausalLM", [5]):
        with pytest.raises(VLLMValidationError, match="architectures .* must be a list of names"):
            ModelConfig(write_config(tmp_path, architectures=wrong))
    nameless = ModelConfig(write_config(tmp_path, architectures=[]))
    with pytest.raises(VLLMValidationError, match="names no `architectures`"):
        check_architecture(nameless)
    check_architecture(
        ModelConfig(write_config(tmp_path, architectures=["Foo", "LlamaForCausalLM"]))
    )


@pytest.mark.parametrize("engine", [LLMEngine, AsyncLLM])
def test_an_engine_resolves_a_configuration_once(
    llama: str, monkeypatch: pytest.MonkeyPatch, engine: type[Any]
) -> None:
    monkeypatch.setattr(engine, "__init__", lambda self, config, log_stats: None)
    config = VllmConfig(model_config=ModelConfig(llama))
    assert not config.is_resolved
    engine.from_vllm_config(config)
    assert config.is_resolved and record(config, "cudagraph_mode") is not None
    config.decisions.clear()
    engine.from_vllm_config(config)
    assert record(config, "cudagraph_mode") is None
