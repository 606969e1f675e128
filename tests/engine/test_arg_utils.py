# SPDX-License-Identifier: Apache-2.0
"""EngineArgs: derived from the config dataclasses, resolved into a VllmConfig."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.checkpoints import EXTRACTION, TRANSFER, write_config
from tests.engine.decision_records import record
from vllm.config import CompilationConfig, EPLBConfig, KVTransferConfig, SpeculativeConfig
from vllm.engine.arg_utils import FLAG_SPECS, AsyncEngineArgs, EngineArgs
from vllm.engine.unsupported_flags import UNSUPPORTED_FLAGS
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.argparse_utils import FlexibleArgumentParser

TO_FILES = {**TRANSFER, "kv_connector_extra_config": {"shared_storage_path": "/tmp/x"}}


def parse(*line: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(list(line)))


def test_flags_and_keywords_have_the_same_defaults() -> None:
    assert parse() == EngineArgs()
    assert dataclasses.fields(AsyncEngineArgs) == dataclasses.fields(EngineArgs)


def test_names_are_unique() -> None:
    names = [spec.name for spec in FLAG_SPECS]
    assert len(names) == len(set(names))
    assert not set(names) & set(UNSUPPORTED_FLAGS)


def test_defaults_are_fresh_objects() -> None:
    EngineArgs().hf_overrides["x"] = 1
    assert EngineArgs().hf_overrides == {}


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        EngineArgs(tensor_paralel_size=1)


def test_the_command_line_of_speculators(llama: str, tmp_path: Path) -> None:
    args = parse(
        *("--model", llama, "--max-model-len", "129", "--gpu-memory-utilization", "0.8"),
        *("--enforce-eager", "--allowed-local-media-path", "/", "--data-parallel-size", "1"),
        *("--tensor-parallel-size", "1", "--trust-remote-code", "--no-enable-chunked-prefill"),
        *("--speculative_config", json.dumps(EXTRACTION)),
        *("--kv_transfer_config", json.dumps(TO_FILES)),
    )
    config = args.create_engine_config()
    assert config.model_config is not None and config.speculative_config is not None
    assert config.model_config.max_model_len == config.scheduler_config.max_model_len == 129
    assert config.model_config.enforce_eager and config.model_config.trust_remote_code
    assert config.cache_config.gpu_memory_utilization == 0.8
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.speculative_config.extraction_layer_ids == [1, 4]
    assert config.speculative_config.target_model_config is config.model_config
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector_extra_config == {"shared_storage_path": "/tmp/x"}
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
    pickle.loads(pickle.dumps(config))


def test_objects_are_accepted_too(llama: str) -> None:
    transfer = KVTransferConfig(
        kv_connector="ExampleHiddenStatesConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"shared_storage_path": Path("/p")},
    )
    compilation = CompilationConfig(cudagraph_capture_sizes=[1, 2])
    config = EngineArgs(
        model=llama,
        kv_transfer_config=transfer,
        speculative_config=SpeculativeConfig(**EXTRACTION),
        compilation_config=compilation,
        dtype=torch.float32,
    ).create_engine_config()
    assert config.kv_transfer_config == transfer
    assert config.compilation_config.capture_sizes_given
    assert config.speculative_config is not None and config.model_config is not None
    assert config.speculative_config.extraction_layer_ids == [1, 4]
    assert config.model_config.dtype is torch.float32


def test_caller_keeps_his_dicts(llama: str) -> None:
    transfer = json.loads(json.dumps(TO_FILES))
    args = EngineArgs(model=llama, kv_transfer_config=transfer, speculative_config=EXTRACTION)
    args.create_engine_config()
    args.create_engine_config()
    assert transfer == TO_FILES and "target_model_config" not in EXTRACTION


@pytest.mark.parametrize(
    "servers",
    [["-dpn", "1"], ["-dpe", "-dpn", "1"], ["-dpl", "1", "-dpr", "1"], ["-dph", "-dpl", "1"]],
)
def test_where_servers_would_meet_is_unused_where_they_need_not(
    llama: str, servers: list[str]
) -> None:
    """Upstream's command lines for replicas behind a load balancer have all of it."""
    meeting = ["-dpa", "10.0.0.1", "-dpp", "13345", "-dpb", "ray"]
    line = ["--model", llama, "-dp", "2", *servers]
    config = parse(*line, *meeting).create_engine_config()
    unused = {
        decision.what: decision.instead_of
        for decision in config.decisions.decisions()
        if decision.chosen == "unused"
    }
    assert unused == {
        "--data-parallel-address": "10.0.0.1",
        "--data-parallel-rpc-port": "13345",
        "--data-parallel-backend": "ray",
    }
    plain = parse(*line).create_engine_config()
    assert plain.parallel_config.local_ranks == config.parallel_config.local_ranks
    assert not [one for one in plain.decisions.decisions() if one.chosen == "unused"]


def test_the_exchange_of_tokens_that_there_is_may_be_named() -> None:
    line = ["-dp", "2", "-ep", "--all2all-backend", "allgather_reducescatter"]
    assert parse(*line) == parse(*line[:3])
    assert EngineArgs(all2all_backend=None).all2all_backend is None


def test_experts_that_follow_the_traffic_are_counted(llama: str, mixture: str) -> None:
    line = ["-tp", "2", "-ep", "--enable-eplb", "--eplb-config", '{"num_redundant_experts": 2}']
    config = parse("--model", mixture, *line).create_engine_config()
    assert config.observability_config.expert_counts
    assert config.parallel_config.eplb_config == EPLBConfig(num_redundant_experts=2)
    (one,) = [one for one in config.decisions.decisions() if one.what == "expert counts"]
    assert one.chosen == "on" and "--enable-eplb" in one.why
    assert not parse("--model", llama).create_engine_config().observability_config.expert_counts


def test_unsupported_flags_are_accepted_at_their_default() -> None:
    line = []
    for name, flag in UNSUPPORTED_FLAGS.items():
        dashed = name.replace("_", "-")
        if isinstance(flag.default, bool):
            line.append(f"--{dashed}" if flag.default else f"--no-{dashed}")
        else:
            line += [f"--{dashed}", "{}" if flag.default == {} else str(flag.default)]
    assert parse(*line) == EngineArgs()


@pytest.mark.parametrize("line", [["-ac.backend", "PAGED"], ["--attention-backend", "PAGED"]])
def test_attention_backend(llama: str, line: list[str]) -> None:
    assert parse("--model", llama, *line).create_engine_config().attention_backend == "PAGED"


def test_swap_space_is_ignored(llama: str) -> None:
    EngineArgs(model=llama, swap_space=4).create_engine_config()


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["-q", "awq"], "quantization", "awq"),
        (["-O3"], "optimization_level", 3),
        (["-cc", "3"], "compilation_config", 3),
        (["-cc.cudagraph_mode", "NONE"], "compilation_config", {"cudagraph_mode": "NONE"}),
        (["-sc", '{"method": "x"}'], "speculative_config", {"method": "x"}),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--hf-overrides", '{"a": {"b": 1}}'], "hf_overrides", {"a": {"b": 1}}),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no-disable-hybrid-kv-cache-manager"], "disable_hybrid_kv_cache_manager", False),
        (["--max-model-len", "auto"], "max_model_len", -1),
        (["--spec-tokens", "3"], "spec_tokens", 3),
        (["--limit-mm-per-prompt", '{"image": 0}'], "limit_mm_per_prompt", {"image": 0}),
        (["--distributed-executor-backend", "mp"], "distributed_executor_backend", "mp"),
        (["--max-num-batched-tokens", "8k"], "max_num_batched_tokens", 8000),
    ],
)
def test_flags(line: list[str], field: str, value: Any) -> None:
    assert getattr(parse(*line), field) == value


@pytest.mark.parametrize(
    ("family", "given", "result"),
    [
        ("llama", None, True),
        ("llama", False, False),
        ("hybrid", None, True),
        ("hybrid", False, False),
    ],
)
def test_prefix_caching(tmp_path: Path, family: str, given: bool | None, result: bool) -> None:
    path = write_config(tmp_path, family)
    config = EngineArgs(model=path, enable_prefix_caching=given).create_engine_config()
    assert config.cache_config.enable_prefix_caching is result
    assert (record(config, "enable_prefix_caching") is not None) == (given is None)


def test_placements_of_no_supernet(llama: str) -> None:
    assert EngineArgs(model=llama).create_engine_config().model_config.most_request_placements == 8
    for given in (0, 8):
        args = EngineArgs(model=llama, max_request_placements=given)
        with pytest.raises(VLLMValidationError, match="--max-request-placements is .*leave it out"):
            args.create_engine_config()


def test_checkpoint_modes(tmp_path: Path) -> None:
    path = write_config(tmp_path, "hybrid")
    aligned = EngineArgs(model=path, mamba_cache_mode="align").create_engine_config()
    assert aligned.cache_config.checkpoint_interval is None
    assert record(aligned, "mamba_cache_mode") is not None
    every = EngineArgs(model=path, mamba_cache_mode="all").create_engine_config()
    assert every.cache_config.checkpoint_interval == 1024
    args = EngineArgs(model=path, mamba_cache_mode="all", mamba_block_size=64)
    assert args.create_engine_config().cache_config.checkpoint_interval == 64


def test_async_scheduling(llama: str) -> None:
    config = EngineArgs(model=llama).create_engine_config()
    assert config.scheduler_config.async_scheduling
    assert record(config, "async_scheduling") is not None
    off = EngineArgs(model=llama, async_scheduling=False).create_engine_config()
    assert not off.scheduler_config.async_scheduling


def test_explicit_settings_win(llama: str) -> None:
    config = EngineArgs(
        model=llama,
        block_size=32,
        max_num_seqs=5,
        max_num_batched_tokens=77,
        num_gpu_blocks_override=9,
        kv_cache_dtype="float32",
        scheduling_policy="priority",
        seed=3,
        load_format="dummy",
    ).create_engine_config()
    assert (config.cache_config.block_size, config.cache_config.cache_dtype) == (32, "float32")
    assert config.cache_config.num_gpu_blocks_override == 9
    assert config.scheduler_config.max_num_seqs == 5
    assert config.scheduler_config.max_num_batched_tokens == 77
    assert config.scheduler_config.policy == "priority"
    assert config.model_config is not None and config.model_config.seed == 3
    assert config.load_config.load_format == "dummy"


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_config(tmp_path, architectures=["FooForCausalLM"])
    with pytest.raises(VLLMValidationError, match="FooForCausalLM.*supported: .*LlamaForCausalLM"):
        EngineArgs(model=path).create_model_config()


def test_class_marker_makes_a_model_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "is_hybrid_model", lambda names: True)
    assert EngineArgs(model=write_config(tmp_path)).create_model_config().is_hybrid


def test_plugins_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins

    calls: list[str] = []
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: calls.append("x"))
    EngineArgs()
    assert calls == ["x"]
