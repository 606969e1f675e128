# SPDX-License-Identifier: Apache-2.0
"""Config dataclasses: unknown keys, wrong values, help."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.exceptions import VLLMValidationError
from vllm.utils.options import build, config, option

ALL: tuple[type[Any], ...] = (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)


@pytest.mark.parametrize("cls", ALL)
def test_every_field_has_help(cls: type[Any]) -> None:
    for field in dataclasses.fields(cls):
        texts = [getattr(value, "help", value) for value in field.metadata.values()]
        assert texts and all(len(str(text)) > 3 for text in texts), field.name


@pytest.mark.parametrize("cls", ALL)
def test_unknown_key_is_named_with_the_allowed_ones(cls: type[Any]) -> None:
    name = next(f.name for f in dataclasses.fields(cls))
    with pytest.raises(VLLMValidationError, match=f"'{name}x'.*allowed keys: .*{name}") as caught:
        cls(**{name + "x": 1})
    assert f"did you mean {name!r}" in str(caught.value)
    assert caught.value.parameter == name + "x"


BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (CacheConfig, {"block_size": 8}, "--block-size.: input should be a multiple of 16; got 8"),
    (CacheConfig, {"block_size": 24}, "--block-size"),
    (CacheConfig, {"block_size": 0}, "--block-size"),
    (CacheConfig, {"block_size": "many"}, "--block-size.*valid integer.*'many'"),
    (CacheConfig, {"gpu_memory_utilization": 0}, "--gpu-memory-utilization.: input should be"),
    (CacheConfig, {"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization.: input should be"),
    (CacheConfig, {"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes.*greater than 0"),
    (
        CacheConfig,
        {"num_gpu_blocks_override": 1},
        "gpu-blocks-override.*or equal to 2",
    ),
    (CacheConfig, {"cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype.*'fp8_e4m3'.*got 'fp8_e5m2'"),
    (CacheConfig, {"mamba_cache_mode": "some"}, "--mamba-cache-mode.*'align'.*got 'some'"),
    (CacheConfig, {"mamba_block_size": 64}, "--mamba-block-size needs --mamba-cache-mode=all"),
    (
        CacheConfig,
        {"mamba_cache_mode": "all", "enable_prefix_caching": False},
        "--mamba-cache-mode=all .* leave it out, or use --enable-prefix-caching",
    ),
    (CacheConfig, {"mamba_block_size": 0}, "--mamba-block-size.*greater than 0"),
    (ParallelConfig, {"pipeline_parallel_size": 0}, "--pipeline-parallel-size.*greater than 0"),
    (ParallelConfig, {"data_parallel_size": 0}, "--data-parallel-size.*greater than 0"),
    (ParallelConfig, {"decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
    (ParallelConfig, {"tensor_parallel_size": 0}, "--tensor-parallel-size.*greater than 0"),
    (
        ParallelConfig,
        {"nnodes": 2, "tensor_parallel_size": 3},
        "--nnodes 2: .* 2 do not divide 3 .--tensor-parallel-size 3 times",
    ),
    (ParallelConfig, {"nnodes": 2}, "--nnodes 2: .* 2 do not divide 1"),
    (ParallelConfig, {"node_rank": 1}, "--node-rank 1 is one of .* --nnodes is 1; add"),
    (ParallelConfig, {"node_rank": -1}, "--node-rank.*or equal to 0"),
    (ParallelConfig, {"master_port": 0}, "--master-port.*or equal to 1"),
    (
        ParallelConfig,
        {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2},
        "--nnodes 2 with 2 replicas: .*--data-parallel-rank",
    ),
    (
        ParallelConfig,
        {"distributed_executor_backend": "external_launcher"},
        "not supported; use mp",
    ),
    (
        ParallelConfig,
        {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
        "uni is one worker; --tensor-parallel-size 2 with --pipeline-parallel-size 1 needs mp",
    ),
    (SchedulerConfig, {"max_num_seqs": 0}, "--max-num-seqs.*greater than 0"),
    (SchedulerConfig, {"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
    (SchedulerConfig, {"policy": "lifo"}, "--scheduling-policy.*'fcfs' or 'priority'.*'lifo'"),
    (SchedulerConfig, {"watermark": 1.0}, "--watermark"),
    (SchedulerConfig, {"stream_interval": 0}, "--stream-interval"),
    (SchedulerConfig, {"long_prefill_token_threshold": -1}, "--long-prefill-token-threshold"),
    (
        SchedulerConfig,
        {"max_num_batched_tokens": 8, "max_num_seqs": 9},
        r"--max-num-batched-tokens \(8\) must be at least --max-num-seqs \(9\)",
    ),
    (
        SchedulerConfig,
        {"max_num_batched_tokens": 512, "max_model_len": 600, "enable_chunked_prefill": False},
        r"--max-num-batched-tokens \(512\) must be at least --max-model-len \(600\)",
    ),
    (LoadConfig, {"load_format": "pt"}, "--load-format.*'dummy'.*'pt'"),
    (LoadConfig, {"model_loader_extra_config": {"a": 1}}, "--model-loader-extra-config.* a"),
    (DeviceConfig, {"device": "tpu"}, "--device"),
    (KVTransferConfig, {"kv_connector": "X"}, "needs kv_role"),
    (KVTransferConfig, {"kv_connector": "X", "kv_role": "both"}, "kv_role.*'kv_both'.*'both'"),
    (KVTransferConfig, {"kv_connector_module_path": ""}, "must not be empty"),
    (LoRAConfig, {}, "LoRA adapters are not supported"),
    (CompilationConfig, {"mode": 4}, "mode"),
    (CompilationConfig, {"mode": "FAST"}, "mode must be 0-3 or one of NONE"),
    (CompilationConfig, {"cudagraph_mode": "SOME"}, "cudagraph_mode must be one of NONE"),
    (CompilationConfig, {"cudagraph_capture_sizes": []}, "--cudagraph-capture-sizes"),
    (CompilationConfig, {"cudagraph_capture_sizes": [0]}, "--cudagraph-capture-sizes"),
    (CompilationConfig, {"max_cudagraph_capture_size": 0}, "--max-cudagraph-capture-size"),
    (
        CompilationConfig,
        {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 4},
        "must be the largest entry",
    ),
    (VllmConfig, {"optimization_level": 4}, "-O 4"),
    (VllmConfig, {"cache_config": {"bloc": 1}}, "cache_config.bloc"),
]


@pytest.mark.parametrize(("cls", "given", "message"), BAD, ids=str)
def test_bad_values(cls: type[Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        cls(**given)


def test_defaults_are_valid() -> None:
    for cls in (CacheConfig, ParallelConfig, SchedulerConfig, LoadConfig, KVTransferConfig):
        cls()


def test_build_takes_objects_and_mappings() -> None:
    made = build(KVTransferConfig, {"kv_connector": "X", "kv_role": "kv_both"}, "--flag")
    assert made.kv_connector == "X"
    again = build(KVTransferConfig, made, "--flag")
    assert vars(again) == vars(made) and again is not made
    with pytest.raises(VLLMValidationError, match="--flag: unknown key 'kv_rol'"):
        build(KVTransferConfig, {"kv_rol": 1}, "--flag")
    with pytest.raises(VLLMValidationError, match="--flag must be a JSON object"):
        build(KVTransferConfig, 3, "--flag")  # type: ignore[arg-type]


@config
class Sample:
    """A sample."""

    count: int = option(default=1, name="how_many", help="How many.")
    tags: list[str] = option(default_factory=list, help="Tags.")


def test_messages_name_flag_and_value() -> None:
    with pytest.raises(VLLMValidationError, match=r"Sample\.count \(--how-many\).*got 'x'"):
        Sample(count="x")  # type: ignore[arg-type]
    with pytest.raises(VLLMValidationError, match=r"Sample\.tags\.1 \(--tags\)"):
        Sample(tags=["a", 3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (KVTransferConfig, "kv_role", "neither"),
        (KVTransferConfig, "kv_port", "a"),
        (SpeculativeConfig, "num_speculative_tokens", "many"),
        (AttentionConfig, "backend", 3),
        (KVEventsConfig, "endpoint", 3),
    ],
)
def test_keys_of_a_flag_are_no_flags_themselves(cls: type[Any], key: str, value: object) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        cls(**{key: value})
    assert str(caught.value).startswith(f"{cls.__name__}.{key}: ") and "--" not in str(caught.value)


def test_factories_are_not_shared() -> None:
    Sample().tags.append("x")
    assert Sample().tags == []


def test_cpu_space_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CacheConfig().cpu_kvcache_space_bytes == 4 * 2**30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert CacheConfig().cpu_kvcache_space_bytes == 2**29
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    with pytest.raises(VLLMValidationError, match="VLLM_CPU_KVCACHE_SPACE"):
        CacheConfig()
