# SPDX-License-Identifier: Apache-2.0
"""Flags of other releases that do nothing here yet: accepted at their default, else refused."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils.dataclass_flags import json_value, optional
from vllm.utils.options import flag_name


@dataclass(frozen=True)
class UnsupportedFlag:
    """`default` is the value drop-in command lines may pass; `what` is missing, do `instead`.

    `many`: the flag takes several words.
    """

    default: Any
    what: str
    instead: str
    aliases: tuple[str, ...] = ()
    many: bool = False


_LORA = ("LoRA adapters", "merge the adapter into the checkpoint")
_CP = ("context parallelism", "leave it out")
_DBO = ("dual-batch overlap", "leave it out")
_MEDIA = ("image, audio and video input", "send text")
_BACKEND = ("choosing this backend", "leave it out, the platform's kernels are used")

UNSUPPORTED_FLAGS: dict[str, UnsupportedFlag] = {
    # model and loading
    "hf_config_path": UnsupportedFlag(None, "a separate config path", "put it beside the weights"),
    "safetensors_load_strategy": UnsupportedFlag("lazy", "load strategies", "leave it out"),
    "io_processor_plugin": UnsupportedFlag(None, "IO processor plugins", "process in the client"),
    "logits_processors": UnsupportedFlag(None, "custom logits processors", "use logit_bias"),
    "enable_prompt_embeds": UnsupportedFlag(False, "prompt embeddings", "send text or token ids"),
    "pooler_config": UnsupportedFlag(None, "pooling models", "serve a generation model"),
    "pt_load_map_location": UnsupportedFlag("cpu", "pickled checkpoints", "use safetensors"),
    "max_parallel_loading_workers": UnsupportedFlag(None, "loading in stages", "leave it out"),
    "override_attention_dtype": UnsupportedFlag(None, "another dtype in attention", "set --dtype"),
    "logits_processor_pattern": UnsupportedFlag(None, "custom logits processors", "use logit_bias"),
    "disable_sliding_window": UnsupportedFlag(False, "ignoring the window", "leave it out"),
    "cpu_offload_gb": UnsupportedFlag(0.0, "weight offloading", "use a larger device"),
    # media
    "allowed_media_domains": UnsupportedFlag(None, *_MEDIA),
    "media_io_kwargs": UnsupportedFlag({}, *_MEDIA),
    "mm_processor_kwargs": UnsupportedFlag(None, *_MEDIA),
    "mm_processor_cache_gb": UnsupportedFlag(4.0, *_MEDIA),
    "skip_mm_profiling": UnsupportedFlag(False, *_MEDIA),
    "interleave_mm_strings": UnsupportedFlag(False, *_MEDIA),
    "mm_processor_cache_type": UnsupportedFlag("lru", *_MEDIA),
    "mm_shm_cache_max_object_size_mb": UnsupportedFlag(128, *_MEDIA),
    "mm_encoder_tp_mode": UnsupportedFlag("weights", *_MEDIA),
    "mm_encoder_attn_backend": UnsupportedFlag(None, *_MEDIA),
    "disable_chunked_mm_input": UnsupportedFlag(False, *_MEDIA),
    "video_pruning_rate": UnsupportedFlag(None, *_MEDIA),
    "ec_transfer_config": UnsupportedFlag(None, *_MEDIA),
    # parallelism
    "prefill_context_parallel_size": UnsupportedFlag(1, *_CP, aliases=("-pcp",)),
    "all2all_backend": UnsupportedFlag(
        "allgather_reducescatter", "another exchange of tokens between replicas", "leave it out"
    ),
    "enable_dbo": UnsupportedFlag(False, *_DBO),
    "enable_elastic_ep": UnsupportedFlag(
        False, "replicas that come and go", "restart with another --data-parallel-size"
    ),
    "expert_placement_strategy": UnsupportedFlag(
        "linear", "other runs of experts", "use --enable-eplb, which places them by the traffic"
    ),
    "enable_return_routed_experts": UnsupportedFlag(
        False, "the experts of each token", "use --expert-counts, which counts them"
    ),
    "ubatch_size": UnsupportedFlag(0, *_DBO),
    "dbo_decode_token_threshold": UnsupportedFlag(32, *_DBO),
    "dbo_prefill_token_threshold": UnsupportedFlag(512, *_DBO),
    "dcp_kv_cache_interleave_size": UnsupportedFlag(1, *_CP),
    "cp_kv_cache_interleave_size": UnsupportedFlag(1, *_CP),
    "disable_nccl_for_dp_synchronization": UnsupportedFlag(
        None, "NCCL between schedulers", "leave it out: they agree over sockets"
    ),
    "ray_workers_use_nsight": UnsupportedFlag(False, "Ray workers", "profile one process"),
    "numa_bind": UnsupportedFlag(False, "NUMA binding", "start the server under numactl"),
    "device_ids": UnsupportedFlag(None, "device lists", "set CUDA_VISIBLE_DEVICES"),
    "worker_cls": UnsupportedFlag("auto", "custom workers", "use --worker-extension-cls"),
    # state memory and scheduling
    "calculate_kv_scales": UnsupportedFlag(
        False, "computing cache scales", "leave it out: scales come from the checkpoint"
    ),
    "kv_cache_dtype_skip_layers": UnsupportedFlag(
        None, "layers with a cache dtype of their own", "leave it out"
    ),
    "kv_sharing_fast_prefill": UnsupportedFlag(False, "KV sharing", "leave it out"),
    "max_num_partial_prefills": UnsupportedFlag(
        1, "limiting concurrent prefills", "use --long-prefill-token-threshold"
    ),
    "max_long_partial_prefills": UnsupportedFlag(
        1, "limiting concurrent prefills", "use --long-prefill-token-threshold"
    ),
    "scheduler_reserve_full_isl": UnsupportedFlag(
        True, "admission without room for the prompt", "leave it on"
    ),
    "disable_cascade_attn": UnsupportedFlag(False, "cascade attention", "leave it out"),
    # adapters
    "enable_lora": UnsupportedFlag(False, *_LORA),
    "max_loras": UnsupportedFlag(1, *_LORA),
    "max_lora_rank": UnsupportedFlag(16, *_LORA),
    "max_cpu_loras": UnsupportedFlag(None, *_LORA),
    "lora_dtype": UnsupportedFlag("auto", *_LORA),
    "fully_sharded_loras": UnsupportedFlag(False, *_LORA),
    "specialize_active_lora": UnsupportedFlag(False, *_LORA),
    "enable_tower_connector_lora": UnsupportedFlag(False, *_LORA),
    "default_mm_loras": UnsupportedFlag(None, *_LORA),
    # kernels
    "mamba_backend": UnsupportedFlag("auto", *_BACKEND),
    "moe_backend": UnsupportedFlag("auto", *_BACKEND),
    "linear_backend": UnsupportedFlag("auto", *_BACKEND),
    "kernel_config": UnsupportedFlag(None, *_BACKEND),
    "gdn_prefill_backend": UnsupportedFlag(None, *_BACKEND),
    "performance_mode": UnsupportedFlag("balanced", "performance modes", "leave it out"),
    # outputs, events, telemetry
    "reasoning_config": UnsupportedFlag(None, "reasoning settings", "leave it out"),
    "weight_transfer_config": UnsupportedFlag(None, "weight updates", "restart the server"),
    "profiler_config": UnsupportedFlag(None, "the profiling routes", "use an external profiler"),
    "otlp_traces_endpoint": UnsupportedFlag(None, "tracing", "read /metrics"),
    "collect_detailed_traces": UnsupportedFlag(None, "tracing", "read /metrics"),
    "kv_cache_metrics": UnsupportedFlag(False, "block life-time metrics", "read /metrics"),
    "kv_cache_metrics_sample": UnsupportedFlag(0.01, "block life-time metrics", "read /metrics"),
    "cudagraph_metrics": UnsupportedFlag(False, "graph metrics", "read the log"),
    "enable_mfu_metrics": UnsupportedFlag(False, "utilisation metrics", "use an external profiler"),
    "enable_layerwise_nvtx_tracing": UnsupportedFlag(False, "NVTX ranges", "use nsys --pytorch"),
    "enable_logging_iteration_details": UnsupportedFlag(False, "step logs", "read /metrics"),
    "show_hidden_metrics_for_version": UnsupportedFlag(None, "hidden metrics", "read /metrics"),
    "aggregate_engine_logging": UnsupportedFlag(False, "several engines", "leave it out"),
}

#: the same, for flags of the server that are not arguments of an engine
UNSUPPORTED_SERVER_FLAGS: dict[str, UnsupportedFlag] = {
    "lora_modules": UnsupportedFlag(None, *_LORA, many=True),
    "tool_server": UnsupportedFlag(None, "built-in tools", "call tools from the client"),
    "h11_max_incomplete_event_size": UnsupportedFlag(
        4 * 2**20, "the h11 HTTP parser", "use --max-request-body-size, httptools parses"
    ),
    "h11_max_header_count": UnsupportedFlag(
        256, "the h11 HTTP parser", "limit headers in a proxy, httptools parses"
    ),
    "tokens_only": UnsupportedFlag(False, "a server without text", "use --skip-tokenizer-init"),
    "grpc": UnsupportedFlag(False, "gRPC", "use HTTP"),
    "enable_offline_docs": UnsupportedFlag(False, "bundled API pages", "read /openapi.json"),
}

#: the same, for the offline benchmarks
UNSUPPORTED_BENCH_FLAGS: dict[str, UnsupportedFlag] = {
    "profile": UnsupportedFlag(False, "profiling", "run under an external profiler"),
    "async_engine": UnsupportedFlag(False, "the asynchronous engine", "use vllm bench serve"),
    "lora_path": UnsupportedFlag(None, *_LORA),
}


def add_unsupported(
    parser: argparse.ArgumentParser, title: str, table: Mapping[str, UnsupportedFlag]
) -> None:
    """Declare the flags of `table` in a help group, so that they are answered, not unknown."""
    group = parser.add_argument_group(
        title, "Accepted at their default value only; any other value is an error."
    )
    for name, flag in table.items():
        group.add_argument(
            *flag.aliases,
            flag_name(name),
            dest=name,
            default=flag.default,
            help=f"Not supported yet: {flag.what}; instead, {flag.instead}.",
            **_settings(name, flag),
        )


def _settings(name: str, flag: UnsupportedFlag) -> dict[str, Any]:
    if flag.many:
        return {"nargs": "+", "metavar": "TEXT"}
    if isinstance(flag.default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(flag.default, int | float):
        return {"type": type(flag.default), "metavar": "X"}
    if isinstance(flag.default, dict) or name.endswith(("_config", "_kwargs")):
        return {"type": optional(json_value), "metavar": "JSON"}
    return {"type": optional(str), "metavar": "TEXT"}


def check_unsupported(
    given: Mapping[str, Any], table: Mapping[str, UnsupportedFlag] = UNSUPPORTED_FLAGS
) -> None:
    """Raise `VLLMValidationError` for a flag of the table that is neither absent (None) nor at its
    default."""
    for name, flag in table.items():
        value = given.get(name)
        if value not in (None, flag.default) and not (value in ({}, [], "") and not flag.default):
            raise VLLMValidationError(
                f"{flag_name(name)} {value!r}: not supported yet: {flag.what}; "
                f"instead, {flag.instead}",
                parameter=name,
                value=value,
            )
