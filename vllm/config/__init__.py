# SPDX-License-Identifier: Apache-2.0
"""Configuration: one file per area; flags, help and docs are derived from these classes.

Names are imported on first use: the command line's parser needs `config.base` only, not torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config.attention import AttentionConfig
    from vllm.config.cache import CacheConfig
    from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode
    from vllm.config.current import (
        get_current_vllm_config,
        get_current_vllm_config_or_none,
        get_layers_from_vllm_config,
        set_current_vllm_config,
    )
    from vllm.config.device import DeviceConfig
    from vllm.config.kv_events import KVEventsConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.config.load import LoadConfig
    from vllm.config.lora import LoRAConfig
    from vllm.config.model import ModelConfig
    from vllm.config.observability import ObservabilityConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.config.structured_outputs import StructuredOutputsConfig
    from vllm.config.vllm import VllmConfig

#: submodule -> names it offers
_MODULES = {
    "attention": ("AttentionConfig",),
    "cache": ("CacheConfig",),
    "compilation": ("CompilationConfig", "CompilationMode", "CUDAGraphMode"),
    "current": (
        "get_current_vllm_config",
        "get_current_vllm_config_or_none",
        "get_layers_from_vllm_config",
        "set_current_vllm_config",
    ),
    "device": ("DeviceConfig",),
    "kv_events": ("KVEventsConfig",),
    "kv_transfer": ("KVTransferConfig",),
    "load": ("LoadConfig",),
    "lora": ("LoRAConfig",),
    "model": ("ModelConfig",),
    "observability": ("ObservabilityConfig",),
    "parallel": ("ParallelConfig",),
    "scheduler": ("SchedulerConfig",),
    "speculative": ("SpeculativeConfig",),
    "structured_outputs": ("StructuredOutputsConfig",),
    "vllm": ("VllmConfig",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AttentionConfig",
    "CUDAGraphMode",
    "CacheConfig",
    "CompilationConfig",
    "CompilationMode",
    "DeviceConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "get_layers_from_vllm_config",
    "set_current_vllm_config",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"vllm.config.{_HOME[name]}"), name)
    raise AttributeError(f"module 'vllm.config' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
