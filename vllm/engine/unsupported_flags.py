# SPDX-License-Identifier: Apache-2.0
"""Flags of other releases that do nothing here yet: accepted at their default, else refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError


@dataclass(frozen=True)
class UnsupportedFlag:
    """`default` is the value drop-in command lines may pass; `what` is missing, do `instead`."""

    default: Any
    what: str
    instead: str
    aliases: tuple[str, ...] = ()


_LORA = ("LoRA adapters", "merge the adapter into the checkpoint")
_DP = ("data parallelism", "start one server per replica")
_EP = ("expert parallelism", "serve a dense model")
_MEDIA = ("image, audio and video input", "send text")
_OFFLOAD = ("KV offloading", "give the GPU more state memory with --gpu-memory-utilization")
_BACKEND = ("choosing this backend", "leave it out, the platform's kernels are used")

UNSUPPORTED_FLAGS: dict[str, UnsupportedFlag] = {
    # model and loading
    "hf_config_path": UnsupportedFlag(None, "a separate config path", "put it beside the weights"),
    "safetensors_load_strategy": UnsupportedFlag("lazy", "load strategies", "leave it out"),
    "io_processor_plugin": UnsupportedFlag(None, "IO processor plugins", "process in the client"),
    "logits_processors": UnsupportedFlag(None, "custom logits processors", "use logit_bias"),
    "enable_sleep_mode": UnsupportedFlag(False, "sleep mode", "stop and restart the server"),
    "enable_prompt_embeds": UnsupportedFlag(False, "prompt embeddings", "send text or token ids"),
    "pooler_config": UnsupportedFlag(None, "pooling models", "serve a generation model"),
    "disable_sliding_window": UnsupportedFlag(False, "ignoring the window", "leave it out"),
    "cpu_offload_gb": UnsupportedFlag(0.0, "weight offloading", "use a larger device"),
    # media
    "allowed_media_domains": UnsupportedFlag(None, *_MEDIA),
    "media_io_kwargs": UnsupportedFlag({}, *_MEDIA),
    "mm_processor_kwargs": UnsupportedFlag(None, *_MEDIA),
    "mm_processor_cache_gb": UnsupportedFlag(4.0, *_MEDIA),
    "skip_mm_profiling": UnsupportedFlag(False, *_MEDIA),
    "interleave_mm_strings": UnsupportedFlag(False, *_MEDIA),
    "ec_transfer_config": UnsupportedFlag(None, *_MEDIA),
    # parallelism
    "data_parallel_size_local": UnsupportedFlag(None, *_DP, aliases=("-dpl",)),
    "data_parallel_address": UnsupportedFlag(None, *_DP, aliases=("-dpa",)),
    "data_parallel_rpc_port": UnsupportedFlag(None, *_DP, aliases=("-dpp",)),
    "data_parallel_backend": UnsupportedFlag("mp", *_DP, aliases=("-dpb",)),
    "data_parallel_start_rank": UnsupportedFlag(None, *_DP, aliases=("-dpr",)),
    "data_parallel_rank": UnsupportedFlag(None, *_DP, aliases=("-dpn",)),
    "data_parallel_hybrid_lb": UnsupportedFlag(False, *_DP, aliases=("-dph",)),
    "data_parallel_external_lb": UnsupportedFlag(False, *_DP, aliases=("-dpe",)),
    "prefill_context_parallel_size": UnsupportedFlag(
        1, "context parallelism", "leave it at 1", aliases=("-pcp",)
    ),
    "enable_expert_parallel": UnsupportedFlag(False, *_EP, aliases=("-ep",)),
    "all2all_backend": UnsupportedFlag(None, *_EP),
    "enable_eplb": UnsupportedFlag(False, *_EP),
    "eplb_config": UnsupportedFlag({}, *_EP),
    "enable_dbo": UnsupportedFlag(False, "dual-batch overlap", "leave it out"),
    "device_ids": UnsupportedFlag(None, "device lists", "set CUDA_VISIBLE_DEVICES"),
    "worker_cls": UnsupportedFlag("auto", "custom workers", "use --worker-extension-cls"),
    # state memory and scheduling
    "mamba_block_size": UnsupportedFlag(
        None, "token blocks of recurrent state", "leave it out, a block holds a whole sequence"
    ),
    "kv_offloading_size": UnsupportedFlag(None, *_OFFLOAD),
    "kv_offloading_backend": UnsupportedFlag("native", *_OFFLOAD),
    "calculate_kv_scales": UnsupportedFlag(False, "fp8 KV caches", "use --kv-cache-dtype auto"),
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
    # kernels
    "mamba_backend": UnsupportedFlag("auto", *_BACKEND),
    "moe_backend": UnsupportedFlag("auto", *_BACKEND),
    "linear_backend": UnsupportedFlag("auto", *_BACKEND),
    "kernel_config": UnsupportedFlag(None, *_BACKEND),
    "gdn_prefill_backend": UnsupportedFlag(None, *_BACKEND),
    "performance_mode": UnsupportedFlag("balanced", "performance modes", "leave it out"),
    # outputs, events, telemetry
    "structured_outputs_config": UnsupportedFlag(None, "structured outputs", "leave it out"),
    "reasoning_config": UnsupportedFlag(None, "reasoning settings", "leave it out"),
    "kv_events_config": UnsupportedFlag(None, "publishing of KV events", "leave it out"),
    "weight_transfer_config": UnsupportedFlag(None, "weight updates", "restart the server"),
    "profiler_config": UnsupportedFlag(None, "the profiling routes", "use an external profiler"),
    "otlp_traces_endpoint": UnsupportedFlag(None, "tracing", "read /metrics"),
    "collect_detailed_traces": UnsupportedFlag(None, "tracing", "read /metrics"),
    "kv_cache_metrics": UnsupportedFlag(False, "block life-time metrics", "read /metrics"),
    "show_hidden_metrics_for_version": UnsupportedFlag(None, "hidden metrics", "read /metrics"),
    "aggregate_engine_logging": UnsupportedFlag(False, "several engines", "leave it out"),
}


def check_unsupported(given: Mapping[str, Any]) -> None:
    """Raise `VLLMValidationError` for a flag of the table that is not at its default."""
    for name, flag in UNSUPPORTED_FLAGS.items():
        value = given[name]
        if value != flag.default and not (value in ({}, [], "") and not flag.default):
            raise VLLMValidationError(
                f"--{name.replace('_', '-')} {value!r}: not supported yet: {flag.what}; "
                f"instead, {flag.instead}",
                parameter=name,
                value=value,
            )
