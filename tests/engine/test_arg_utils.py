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

from tests.config.checkpoints import write_config
from vllm import decisions
from vllm.config import (
    CompilationConfig,
    EPLBConfig,
    KVTransferConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import FLAG_SPECS, AsyncEngineArgs, EngineArgs
from vllm.engine.batch_defaults import UsageContext, batch_limits
from vllm.engine.unsupported_flags import UNSUPPORTED_FLAGS
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.cuda import CudaPlatform, GpuFacts
from vllm.utils.argparse_utils import FlexibleArgumentParser

EXTRACTION = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
}
TRANSFER = {
    "kv_connector": "ExampleHiddenStatesConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"shared_storage_path": "/tmp/x"},
}


def parse(*line: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(list(line)))


def record(config: VllmConfig, what: str) -> decisions.Decision | None:
    return next((d for d in config.decisions.decisions() if d.what == what), None)


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
        *("--kv_transfer_config", json.dumps(TRANSFER)),
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
    transfer = json.loads(json.dumps(TRANSFER))
    args = EngineArgs(model=llama, kv_transfer_config=transfer, speculative_config=EXTRACTION)
    args.create_engine_config()
    args.create_engine_config()
    assert transfer == TRANSFER and "target_model_config" not in EXTRACTION


TWO_HOSTS = {"tensor_parallel_size": 2, "nnodes": 2}
SHARED_EXPERTS = {"data_parallel_size": 2, "enable_expert_parallel": True}
P2P = {"kv_role": "kv_both"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_eplb": True, "tensor_parallel_size": 2}, "--enable-eplb .* needs --enable-expert-p"),
    ({"enable_eplb": True, "enable_expert_parallel": True}, "-data-parallel-size above 1"),
    ({"eplb_config": {"step_interval": 9000}}, "--eplb-config has no effect without --enable-epl"),
    ({"eplb_config": {"use_async": True}}, "--eplb-config: unknown key 'use_async'; .*window_size"),
    ({"eplb_config": {"window_size": 4000}}, "window_size 4000 is more than step_interval 3000"),
    ({"distributed_executor_backend": "slurm"}, "--distributed-executor-backend slurm.*use mp"),
    ({"pipeline_parallel_size": 5}, "--pipeline-parallel-size 5: the model has 4 layers"),
    ({**TWO_HOSTS, "ready_in": 5.0}, "--ready-in with --nnodes 2"),
    (
        {**TWO_HOSTS, "kv_transfer_config": {**P2P, "kv_connector": "P2pConnector"}},
        "--nnodes 2 beside kv_connector P2pConnector",
    ),
    (
        {
            **TWO_HOSTS,
            "kv_transfer_config": {
                **P2P,
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{**P2P, "kv_connector": "P2pConnector"}]
                },
            },
        },
        "--nnodes 2 beside kv_connector MultiConnector",
    ),
    ({"data_parallel_size": 2, "data_parallel_rank": 2}, "--data-parallel-rank 2.*0 to"),
    ({"data_parallel_address": "10.0.0.1"}, "--data-parallel-address 10.*--data-parallel-start-r"),
    ({"data_parallel_rpc_port": 5000}, "--data-parallel-rpc-port 5000.*replicas on other hosts"),
    ({"data_parallel_backend": "ray"}, "--data-parallel-backend ray.*with --data-parallel-rank"),
    ({"data_parallel_backend": "slurm"}, "--data-parallel-backend"),
    ({"all2all_backend": "deepep_low_latency"}, "--all2all-backend.*another exchange.*leave it"),
    ({**SHARED_EXPERTS, "data_parallel_rank": 1}, "one server runs all of them; leave out"),
    ({**SHARED_EXPERTS, **TWO_HOSTS}, "processes of one host; for several hosts"),
    ({**SHARED_EXPERTS, "distributed_executor_backend": "ray"}, "or Ray, use --tensor-parallel"),
    ({**SHARED_EXPERTS, "pipeline_parallel_size": 2}, "stages of several replicas do not share"),
    ({**SHARED_EXPERTS, "ready_in": 5.0}, "--ready-in with --enable-expert-parallel"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype.*got 'fp8_e5m2'"),
    ({"block_size": 20}, "--block-size"),
    ({"max_model_len": 10**6}, "--max-model-len 1000000"),
    ({"dtype": "int4"}, "--dtype"),
    ({"quantization": "awq"}, "--quantization awq"),
    ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens must be given"),
    ({"speculative_config": {"methd": "x"}}, "--speculative-config: unknown key 'methd'.*allowed"),
    (
        {"speculative_config": {**EXTRACTION, "tensor_parallel_size": 1}},
        "draft_tensor_parallel_size instead",
    ),
    ({"speculative_config": {**EXTRACTION, "quantization": "fp8"}}, "speculative_config.quantiz"),
    ({"speculative_config": {**EXTRACTION, "target_model_config": 1}}, "unknown key 'target_model"),
    ({"speculative_config": 3}, "--speculative-config must be a JSON object"),
    ({"speculative_config": {}}, "none is not supported; supported: extract"),
    ({"speculative_config": EXTRACTION}, "needs --kv-transfer-config"),
    ({"speculative_config": EXTRACTION, "spec_method": "x"}, "given both by --spec-method"),
    ({"spec_method": "medusa", "spec_tokens": 3}, "medusa is not supported; use eagle3, dflash or"),
    (
        {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 24}},
        "suffix is not supported; use ngram",
    ),
    (
        {"speculative_config": {"method": "eagle3", "model": "x", "parallel_drafting": True}},
        "parallel_drafting: peagle is not supported; use dflash",
    ),
    ({"kv_transfer_config": {"kv_rol": 1}}, "--kv-transfer-config: unknown key 'kv_rol'"),
    ({"kv_transfer_config": "x"}, "--kv-transfer-config must be a JSON object"),
    ({"compilation_config": {"cudagraf": 1}}, "--compilation-config: unknown key 'cudagraf'"),
    (
        {
            "compilation_config": {"cudagraph_capture_sizes": [1]},
            "cudagraph_capture_sizes": [1],
        },
        "given both by --cudagraph-capture-sizes",
    ),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 300}, "--max-model-len .512."),
    ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "--max-num-batched-tokens .4."),
    ({"max_num_seqs": 0}, r"\(--max-num-seqs\): input should be greater than 0"),
    ({"optimization_level": 7}, "-O 7"),
    ({"enable_lora": True}, "--enable-lora True: not supported yet: LoRA adapters; instead, merge"),
    ({"kv_offloading_size": 0}, "kv_offloading_size"),
    ({"kv_offloading_backend": "lmcache"}, "no effect without --kv-offloading-size"),
    (
        {
            "kv_offloading_size": 1,
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        },
        "as children of a MultiConnector",
    ),
    ({"mm_processor_kwargs": {"a": 1}}, "--mm-processor-kwargs"),
    ({"gdn_prefill_backend": "x"}, "--gdn-prefill-backend"),
    ({"cpu_offload_gb": 1}, "--cpu-offload-gb 1"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_refused(llama: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        EngineArgs(**{"model": llama, **given}).create_engine_config()


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


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FLAGS))
def test_unsupported_flags_name_themselves(name: str) -> None:
    flag = UNSUPPORTED_FLAGS[name]
    other = (not flag.default) if isinstance(flag.default, bool) else "17"
    with pytest.raises(VLLMValidationError, match=f"--{name.replace('_', '-')} ") as caught:
        EngineArgs(**{name: other})
    assert caught.value.parameter == name and flag.instead in str(caught.value)


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


class _Gpu(CudaPlatform):
    def __init__(self, gib: int) -> None:
        self.facts = GpuFacts("GPU-0", "gpu", gib * 2**30, (9, 0))

    def total_memory_bytes(self, device_id: int = 0) -> int:
        return self.facts.total_bytes


SERVER, OFFLINE = UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS


@pytest.mark.parametrize(
    ("gib", "usage", "tokens", "seqs"),
    [
        (80, SERVER, 8192, 1024),
        (80, OFFLINE, 16384, 1024),
        (70, SERVER, 8192, 1024),
        (24, SERVER, 2048, 256),
        (24, OFFLINE, 8192, 256),
    ],
)
def test_batch_defaults(gib: int, usage: UsageContext, tokens: int, seqs: int) -> None:
    limits = batch_limits(
        None, None, max_model_len=4096, chunked_prefill=True, usage=usage, platform=_Gpu(gib)
    )
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("tokens", "seqs", "length", "chunked", "per_request", "result"),
    [
        (None, None, 4096, False, 1, (4096, 256)),
        (None, None, 4, True, 1, (1024, 256)),
        (16, None, 4096, True, 1, (16, 16)),
        (16, None, 4096, True, 2, (16, 8)),
        (1, None, 4096, True, 2, (1, 1)),
        (None, 3000, 4096, True, 1, (3000, 3000)),
        (None, 3000, 4096, True, 2, (6000, 3000)),
        (100, 50, 4096, True, 2, (100, 50)),
    ],
)
def test_batch_limits_fit_each_other(
    tokens: int | None,
    seqs: int | None,
    length: int,
    chunked: bool,
    per_request: int,
    result: tuple[int, int],
) -> None:
    limits = batch_limits(
        tokens,
        seqs,
        max_model_len=length,
        chunked_prefill=chunked,
        usage=SERVER,
        platform=_Gpu(24),
        tokens_per_request=per_request,
    )
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == result


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
