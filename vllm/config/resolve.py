# SPDX-License-Identifier: Apache-2.0
"""Choices that follow from several configs together; each one is a decision record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm import decisions
from vllm.config.compilation import CUDAGraphMode
from vllm.exceptions import VLLMValidationError
from vllm.utils import startup_phases

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

_GRAPHS_OF_LEVEL = {
    0: CUDAGraphMode.NONE,
    1: CUDAGraphMode.PIECEWISE,
    2: CUDAGraphMode.FULL_AND_PIECEWISE,
    3: CUDAGraphMode.FULL_AND_PIECEWISE,
}
_SSM_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
}

#: longer rings gain nothing: replaying costs what writing saves (docs/state_memory.md)
_DEFERRED_TOKENS = 6


def resolve(config: VllmConfig) -> None:
    """Check the configs against each other and fill what depends on several."""
    _adopt_attention_config(config)
    _adopt_model_length(config)
    _apply_model_rules(config)
    _resolve_quantization(config)
    _check_convolution_dtype(config)
    _resolve_recurrent_dtypes(config)
    _resolve_deferred_commit(config)
    _resolve_prefill_split(config)
    _resolve_speculation(config)
    _resolve_hybrid_manager(config)
    _resolve_graphs(config)


def _adopt_attention_config(config: VllmConfig) -> None:
    """The two spellings of the attention backend become one."""
    asked = config.attention_config.backend if config.attention_config else None
    if asked is None:
        return
    if config.attention_backend not in (None, asked):
        raise VLLMValidationError(
            f"--attention-backend {config.attention_backend} and --attention-config backend "
            f"{asked} differ; give one of them",
            parameter="attention_backend",
            value=asked,
        )
    config.attention_backend = asked


def _adopt_model_length(config: VllmConfig) -> None:
    model = config.model_config
    if model is None:
        return
    config.scheduler_config.max_model_len = model.max_model_len
    if config.cache_config.sliding_window is None:
        config.cache_config.sliding_window = model.get_sliding_window()


def _resolve_quantization(config: VllmConfig) -> None:
    """How weights are quantised; the layers read it when the model is built."""
    from vllm.model_executor.layers.quantization.registry import (
        make_quantization_config,
        stored_quantization,
    )

    if config.model_config is None:
        return
    config.quant_config = make_quantization_config(config.model_config)
    if stored_quantization(config.model_config):
        why = "the checkpoint's quantization_config"
        decisions.record("quantization", config.quant_config.name, why)


def _check_convolution_dtype(config: VllmConfig) -> None:
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import dtype_name

    model, asked = config.model_config, config.cache_config.mamba_cache_dtype
    if model is None or not model.is_hybrid or asked == "auto":
        return
    of_model = dtype_name(model.dtype)
    if asked != of_model and not current_platform.converts_conv_state:
        raise VLLMValidationError(
            f"--mamba-cache-dtype {asked}: on this device the convolution's state has the dtype "
            f"of the model, {of_model}; leave it out or add --dtype {asked}",
            parameter="mamba_cache_dtype",
            value=asked,
        )


def _resolve_recurrent_dtypes(config: VllmConfig) -> None:
    model, cache = config.model_config, config.cache_config
    if model is None or not model.is_hybrid or cache.mamba_ssm_cache_dtype != "auto":
        return
    stated = getattr(model.hf_text_config, "mamba_ssm_dtype", None)
    name = str(stated).removeprefix("torch.") if stated is not None else "float32"
    if name not in _SSM_DTYPES:
        raise VLLMValidationError(
            f"the checkpoint asks for recurrent state in {name}; choose --mamba-ssm-cache-dtype "
            "from " + ", ".join(_SSM_DTYPES),
            parameter="mamba_ssm_cache_dtype",
            value=name,
        )
    cache.mamba_ssm_cache_dtype = _SSM_DTYPES[name]
    why = "the checkpoint's mamba_ssm_dtype" if stated is not None else "state sums many terms"
    decisions.record("mamba_ssm_cache_dtype", name, why)


def _resolve_deferred_commit(config: VllmConfig) -> None:
    """How often recurrent state is written back; 1 where something looks at it in every step."""
    model, cache = config.model_config, config.cache_config
    if model is None or not model.is_hybrid:
        return
    asked = cache.deferred_commit_tokens
    reason = "--deferred-commit-tokens 1" if asked == 1 else _commit_at_once(config)
    cache.commit_interval = 1 if reason else asked or _DEFERRED_TOKENS
    chosen = "off" if reason else f"every {cache.commit_interval} tokens"
    why = reason or "decode steps read the recurrent state and seldom write it"
    decisions.record("deferred commit", chosen, why, asked if reason and asked != 1 else None)


def _commit_at_once(config: VllmConfig) -> str | None:
    """Why every decode step must write recurrent state, or None."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    if not current_platform.defers_commit:
        return f"{current_platform.device_type} kernels write it with every token"
    if config.cache_config.sanitize:
        return "--sanitize looks at every state after every step"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        connector = KVConnectorFactory.get_connector_class(transfer)
        if connector.reads_recurrent_state(transfer.kv_connector_extra_config):
            return f"connector {transfer.kv_connector} reads state blocks"
    return None


def _resolve_prefill_split(config: VllmConfig) -> None:
    """Whether long prompts may be scanned in segments, which costs the promise of equal bits."""
    from vllm.platforms import current_platform

    model, cache = config.model_config, config.cache_config
    if model is None or not model.is_hybrid:
        return
    asked = cache.recurrent_prefill_split
    if asked == "off":
        why = "--recurrent-prefill-split off"
    elif not current_platform.splits_scans:
        why = f"{current_platform.device_type} kernels scan whole sequences"
    elif asked == "auto" and cache.enable_prefix_caching:
        why = "prefix caching promises the bits of computing everything again"
    else:
        cache.splits_scans = True
        why = "few long prompts leave most of the device idle; results differ within rounding"
    chosen = "on" if cache.splits_scans else "off"
    refused = asked == "on" and not cache.splits_scans
    decisions.record("recurrent prefill split", chosen, why, asked if refused else None)


def _resolve_speculation(config: VllmConfig) -> None:
    speculative = config.speculative_config
    if speculative is None:
        return
    if speculative.uses_extract_hidden_states() and config.kv_transfer_config is None:
        raise VLLMValidationError(
            "speculative_config method extract_hidden_states needs --kv-transfer-config: a "
            "connector (such as ExampleHiddenStatesConnector, role kv_producer) that stores the "
            "hidden states",
            parameter="kv_transfer_config",
        )
    scheduler = config.scheduler_config
    needed = scheduler.max_num_seqs * speculative.tokens_per_request
    if scheduler.max_num_batched_tokens < needed:
        decisions.record(
            "max_num_batched_tokens",
            needed,
            f"each of max_num_seqs={scheduler.max_num_seqs} requests verifies draft tokens beside "
            "its own",
            scheduler.max_num_batched_tokens,
        )
        scheduler.max_num_batched_tokens = needed


def _resolve_hybrid_manager(config: VllmConfig) -> None:
    """Several cache geometries need the hybrid allocator; the arena has no other."""
    model = config.model_config
    if config.scheduler_config.disable_hybrid_kv_cache_manager and model and model.is_hybrid:
        raise VLLMValidationError(
            "--disable-hybrid-kv-cache-manager (set, or because the KV connector handles a single "
            "cache group only): this model has attention and recurrent layers, which cannot share "
            "one cache geometry",
            parameter="disable_hybrid_kv_cache_manager",
            value=True,
        )


def _resolve_graphs(config: VllmConfig) -> None:
    from vllm.platforms import current_platform

    compilation, level = config.compilation_config, config.optimization_level
    if level not in _GRAPHS_OF_LEVEL:
        raise VLLMValidationError(
            f"-O {level}: the optimization level must be 0, 1, 2 or 3", "optimization_level", level
        )
    wanted = compilation.cudagraph_mode or _GRAPHS_OF_LEVEL[level]
    chosen, why = wanted, ""
    if config.model_config is not None and config.model_config.enforce_eager:
        chosen, why = CUDAGraphMode.NONE, "--enforce-eager"
    elif not current_platform.supports_graphs:
        chosen, why = CUDAGraphMode.NONE, f"{current_platform.device_type} has no graphs"
    elif wanted.mixed_is_full:
        chosen = CUDAGraphMode.FULL_AND_PIECEWISE
        why = "what prefills launch depends on the batch, so their steps are captured in pieces"
    if chosen is not wanted:
        decisions.record("cudagraph_mode", chosen.name, why, wanted.name)
    compilation.cudagraph_mode = chosen
    ignored = compilation.ignored_keys()
    if ignored:
        why = f"compilation_config keys {', '.join(ignored)} steer a compiler that is not used"
        decisions.record("torch.compile", "none", why)
    scheduler = config.scheduler_config
    compilation.resolve_capture_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    if compilation.ready_in is not None:
        compilation.ready_by_s = startup_phases.began_s() + compilation.ready_in
    if compilation.piecewise_capture_sizes:
        decisions.record(
            "piecewise graphs",
            f"steps of up to {compilation.piecewise_capture_sizes[-1]} tokens",
            "launching larger steps takes the host less time than the device needs for them",
        )


def _apply_model_rules(config: VllmConfig) -> None:
    """Let the model family check or adjust the configs."""
    if config.model_config is None:
        return
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    rules = MODELS_CONFIG_MAP.get(config.model_config.architecture)
    if rules is not None:
        rules.verify_and_update_config(config)
