# SPDX-License-Identifier: Apache-2.0
"""Choices that follow from several configs, the model class, the device and the KV connector.

The config package knows none of those; this module asks them. Each choice is a decision record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from vllm import decisions
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    KVTransferConfig,
    ModelConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.layout_checks import check_layout
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.quantization.registry import (
    make_quantization_config,
    stored_quantization,
)
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils import startup_phases
from vllm.utils.torch_utils import dtype_name

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


def resolve(config: VllmConfig) -> VllmConfig:
    """Check the configs against each other and fill what depends on several; returns `config`.

    Raises `VLLMValidationError` for what cannot be honoured.
    """
    with config.decisions.current():
        _resolve(config)
    config.is_resolved = True
    return config


def _resolve(config: VllmConfig) -> None:
    if config.model_config is not None:
        rules = MODELS_CONFIG_MAP.get(config.model_config.architecture)
        if rules is not None:
            rules.verify_and_update_config(config)
        check_layout(config)
        config.model_config.record_generation_config()
        _note_unused_flags(config)
        _resolve_expert_counts(config)
        _resolve_quantization(config)
        recurrent = _recurrent_model(config)
        if recurrent is not None:
            _check_convolution_dtype(config)
            _resolve_recurrent_dtypes(config.cache_config, recurrent)
            _resolve_deferred_commit(config)
            _resolve_prefill_split(config)
    _resolve_speculation(config)
    _check_hybrid_manager(config)
    _resolve_graphs(config)


def _note_unused_flags(config: VllmConfig) -> None:
    """Command lines for servers that meet are right for servers that need not."""
    for flag, value in config.parallel_config.replica_flags.meeting.items():
        why = "a server's replicas are processes of its host, and need not know of other servers'"
        decisions.record(flag, "unused", why, value)


def check_architecture(model: ModelConfig) -> None:
    """Raise `VLLMValidationError` listing the known architectures if no model class fits.

    A class marked as hybrid makes the model hybrid, whatever its config says.
    """
    names = model.architectures
    if not names:
        raise VLLMValidationError(
            f"config.json of {model.model!r} names no `architectures`; set them with "
            "--hf-overrides",
            parameter="model",
            value=model.model,
        )
    known = ModelRegistry.get_supported_archs()
    if not known.intersection(names):
        raise VLLMValidationError(
            f"architecture {', '.join(names)} of {model.model!r} is not supported; supported: "
            + ", ".join(sorted(known))
            + "; a plugin can register others (docs/adding_a_model.md)",
            parameter="model",
            value=model.model,
        )
    if not model.is_hybrid and ModelRegistry.is_hybrid_model(names):
        model.model_arch_config = dataclasses.replace(model.model_arch_config, is_hybrid=True)


def resolve_hybrid_manager(
    disable: bool | None,
    transfer: KVTransferConfig | None,
    supports_groups: Callable[[KVTransferConfig], bool] = KVConnectorFactory.supports_hma_config,
) -> bool:
    """The resolved value of `--disable-hybrid-kv-cache-manager`.

    An explicit "keep it on" together with a connector that handles only one cache group raises
    `VLLMValidationError`; without an explicit wish the manager is then off, and that is recorded.
    """
    if disable:
        return True
    if transfer is None or not transfer.is_kv_transfer_instance or supports_groups(transfer):
        return False
    reason = f"connector {transfer.kv_connector} handles a single cache group only"
    if disable is False:
        raise VLLMValidationError(
            f"--no-disable-hybrid-kv-cache-manager: {reason}; leave the flag out or use a "
            "connector that subclasses SupportsHMA",
            parameter="disable_hybrid_kv_cache_manager",
            value=False,
        )
    decisions.record("hybrid_kv_cache_manager", "off", reason, "on")
    return True


def _resolve_expert_counts(config: VllmConfig) -> None:
    """Experts follow the traffic by their counts."""
    if config.parallel_config.enable_eplb and not config.observability_config.expert_counts:
        config.observability_config.expert_counts = True
        decisions.record("expert counts", "on", "--enable-eplb places experts by them", "off")


def _resolve_quantization(config: VllmConfig) -> None:
    """How weights are quantised; the layers read it when the model is built."""
    model = config.model_config
    config.quant_config = make_quantization_config(model)
    if config.quant_config is not None:
        model.quantization = config.quant_config.name
    if stored_quantization(model):
        why = "the checkpoint's quantization_config"
        chosen = "16 bits" if config.quant_config is None else config.quant_config.name
        decisions.record("quantization", chosen, why)


def _check_convolution_dtype(config: VllmConfig) -> None:
    asked, of_model = config.cache_config.mamba_cache_dtype, dtype_name(config.model_config.dtype)
    if asked not in ("auto", of_model) and not current_platform.converts_conv_state:
        raise VLLMValidationError(
            f"--mamba-cache-dtype {asked}: on this device the convolution's state has the dtype "
            f"of the model, {of_model}; leave it out or add --dtype {asked}",
            parameter="mamba_cache_dtype",
            value=asked,
        )


def _recurrent_model(config: VllmConfig) -> ModelConfig | None:
    """The served model if it has recurrent layers, else the draft model if that has."""
    draft = None if config.drafter is None else config.drafter.model_config
    if draft is not None:
        check_architecture(draft)
    models = (config.model_config, draft)
    return next((model for model in models if model is not None and model.is_hybrid), None)


def _resolve_recurrent_dtypes(cache: CacheConfig, model: ModelConfig) -> None:
    if cache.mamba_ssm_cache_dtype != "auto":
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
    """How often recurrent state is written back; 1 where something looks at it in every step. A
    connector says so step by step."""
    cache = config.cache_config
    asked = cache.deferred_commit_tokens
    reason = "--deferred-commit-tokens 1" if asked == 1 else _commit_at_once(config)
    cache.commit_interval = 1 if reason else asked or _DEFERRED_TOKENS
    chosen = "off" if reason else f"every {cache.commit_interval} tokens"
    why = reason or "decode steps read the recurrent state and seldom write it"
    decisions.record("deferred commit", chosen, why, asked if reason and asked != 1 else None)


def _commit_at_once(config: VllmConfig) -> str | None:
    """Why every decode step must write recurrent state, or None."""
    if not current_platform.defers_commit:
        return f"{current_platform.device_type} kernels write it with every token"
    if config.cache_config.sanitize:
        return "--sanitize looks at every state after every step"
    return None


def _resolve_prefill_split(config: VllmConfig) -> None:
    """Whether long prompts may be scanned in segments, which costs the promise of equal bits."""
    cache = config.cache_config
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
    _check_loaded_rows(config)
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


def _check_loaded_rows(config: VllmConfig) -> None:
    """`VLLMValidationError` for a drafter beside a connector that cannot load what it keeps."""
    drafter, transfer = config.drafter, config.kv_transfer_config
    if drafter is None or not drafter.reads_target or not transfer or not transfer.is_kv_consumer:
        return
    connector = KVConnectorFactory.get_connector_class(transfer)
    if connector.loads_drafter_rows(transfer, drafter.num_ahead):
        return
    why = "does not load the rows of a drafter's own layers"
    if connector.loads_drafter_rows(transfer, 0):
        why = f"does not compare the token after what it loads, which {drafter.method} depends on"
    raise VLLMValidationError(
        f"speculative_config method {drafter.method} beside kv_connector {transfer.kv_connector} "
        f"with kv_role {transfer.kv_role}, which {why}; use OffloadingConnector, "
        "P2pConnector or NixlConnector, kv_role kv_producer, or method draft_model or ngram",
        parameter="kv_transfer_config.kv_role",
        value=transfer.kv_role,
    )


def _check_hybrid_manager(config: VllmConfig) -> None:
    """Several cache geometries need the hybrid allocator; the arena has no other."""
    model = config.model_config
    if config.scheduler_config.disable_hybrid_kv_cache_manager and model and model.is_hybrid:
        raise VLLMValidationError(
            "--disable-hybrid-kv-cache-manager (set, or because the KV connector handles a single "
            "cache group only): this model has attention and recurrent layers, which cannot share "
            "one cache geometry; leave the flag out, and use a connector whose class derives from "
            "SupportsHMA",
            parameter="disable_hybrid_kv_cache_manager",
            value=True,
        )


def _resolve_graphs(config: VllmConfig) -> None:
    compilation, level = config.compilation_config, config.optimization_level
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
