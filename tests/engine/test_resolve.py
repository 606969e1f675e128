# SPDX-License-Identifier: Apache-2.0
"""Choices that follow from several configs, the device and the connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.config.checkpoints import HYBRID, extraction, write_config
from vllm import decisions
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.compilation import default_piecewise_sizes
from vllm.engine.resolve import check_architecture, resolve, resolve_hybrid_manager
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

TRANSFER = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}


def record(config: VllmConfig, what: str) -> decisions.Decision | None:
    return next((d for d in config.decisions.decisions() if d.what == what), None)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that captures graphs."""
    monkeypatch.setattr(type(current_platform), "supports_graphs", True)


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


def test_what_is_not_served_of_a_generation_config_is_recorded_at_the_start(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [7]}')
    found = record(resolve(VllmConfig(model_config=ModelConfig(path))), "generation config")
    assert found is not None and found.instead_of == "suppress_tokens: [7]"


def test_dense_model_has_no_recurrent_dtype(llama: str) -> None:
    config = resolve(VllmConfig(model_config=ModelConfig(llama)))
    assert config.cache_config.mamba_ssm_cache_dtype == "auto"


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


def test_graphs_are_off_on_the_cpu() -> None:
    config = resolve(VllmConfig())
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_capture_sizes == []
    made = record(config, "cudagraph_mode")
    assert made is not None and made.instead_of == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize(
    ("level", "given", "eager", "result"),
    [
        (0, None, False, "NONE"),
        (1, None, False, "PIECEWISE"),
        (2, None, False, "FULL_AND_PIECEWISE"),
        (3, None, False, "FULL_AND_PIECEWISE"),
        (0, "FULL", False, "FULL_AND_PIECEWISE"),
        (0, "PIECEWISE", False, "PIECEWISE"),
        (0, "FULL_AND_PIECEWISE", False, "FULL_AND_PIECEWISE"),
        (2, "FULL_DECODE_ONLY", False, "FULL_DECODE_ONLY"),
        (2, "NONE", False, "NONE"),
        (2, "FULL", True, "NONE"),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_graph_mode(llama: str, level: int, given: Any, eager: bool, result: str) -> None:
    config = resolve(
        VllmConfig(
            model_config=ModelConfig(llama, enforce_eager=eager),
            compilation_config=CompilationConfig(cudagraph_mode=given),
            optimization_level=level,
        )
    )
    compilation = config.compilation_config
    assert compilation.cudagraph_mode is not None
    assert compilation.cudagraph_mode.name == result
    if given not in (None, result):
        made = record(config, "cudagraph_mode")
        assert made is not None and made.instead_of == given
    assert bool(compilation.cudagraph_capture_sizes) == (result != "NONE")
    assert bool(compilation.decode_capture_sizes) == ("FULL" in result)
    assert bool(compilation.piecewise_capture_sizes) == ("PIECEWISE" in result)
    limit = record(config, "piecewise graphs")
    assert (limit is not None) == ("PIECEWISE" in result)
    assert limit is None or "2048 tokens" in limit.chosen


@pytest.mark.usefixtures("graphs")
def test_capture_sizes_never_exceed_a_decode_batch(llama: str) -> None:
    scheduler = SchedulerConfig(max_num_seqs=20)
    config = resolve(VllmConfig(scheduler_config=scheduler))
    compilation = config.compilation_config
    assert compilation.decode_capture_sizes == [1, 2, 4, 8, 16, 20]
    assert compilation.piecewise_capture_sizes == default_piecewise_sizes(2048)
    assert compilation.max_cudagraph_capture_size == 2048
    model = ModelConfig(llama)
    both = resolve(
        VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(max_num_seqs=20),
            speculative_config=extraction(model),
            kv_transfer_config=TRANSFER,  # type: ignore[arg-type]
        )
    )
    # Extraction verifies no draft, so its decodes are one token per request too.
    assert both.compilation_config.decode_capture_sizes[-1] == 20


@pytest.mark.parametrize(
    ("mode", "decode", "pieces"),
    [
        ("FULL_AND_PIECEWISE", [2, 16], [2, 16, 100]),
        ("PIECEWISE", [], [2, 16, 100]),
        ("NONE", [], []),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_given_sizes_serve_both_kinds_of_steps(
    mode: str, decode: list[int], pieces: list[int]
) -> None:
    config = resolve(
        VllmConfig(
            scheduler_config=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=512),
            compilation_config=CompilationConfig(
                cudagraph_mode=mode, cudagraph_capture_sizes=[100, 2, 16]
            ),
        )
    )
    compilation = config.compilation_config
    assert compilation.decode_capture_sizes == decode
    assert compilation.piecewise_capture_sizes == pieces
    assert compilation.cudagraph_capture_sizes == sorted({*decode, *pieces})


@pytest.mark.parametrize(
    ("mode", "size", "flag"),
    [
        ("FULL_DECODE_ONLY", 21, "--max-num-seqs 20"),
        ("FULL_AND_PIECEWISE", 513, "--max-num-batched-tokens 512"),
        ("PIECEWISE", 513, "--max-num-batched-tokens 512"),
    ],
)
@pytest.mark.usefixtures("graphs")
def test_a_size_that_no_step_has_is_an_error(mode: str, size: int, flag: str) -> None:
    def build(largest: int) -> VllmConfig:
        return resolve(
            VllmConfig(
                scheduler_config=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=512),
                compilation_config=CompilationConfig(
                    cudagraph_mode=mode, cudagraph_capture_sizes=[1, largest]
                ),
            )
        )

    with pytest.raises(VLLMValidationError, match=f"asks for {size}, but with {flag}"):
        build(size)
    build(size - 1)


@pytest.mark.usefixtures("graphs")
def test_the_largest_size_bounds_both_kinds_of_steps() -> None:
    config = resolve(
        VllmConfig(
            scheduler_config=SchedulerConfig(max_num_seqs=200, max_num_batched_tokens=4096),
            compilation_config=CompilationConfig(max_cudagraph_capture_size=100),
        )
    )
    compilation = config.compilation_config
    assert compilation.decode_capture_sizes[-1] == 100
    assert compilation.piecewise_capture_sizes == [8, 16, 32, 64, 100]


def test_settings_of_a_compiler_are_recorded() -> None:
    config = resolve(VllmConfig(compilation_config=CompilationConfig(mode=3, custom_ops=["all"])))
    made = record(config, "torch.compile")
    assert made is not None and "mode, custom_ops" in made.why


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
