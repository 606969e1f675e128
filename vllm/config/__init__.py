# SPDX-License-Identifier: Apache-2.0
"""Configuration: one file per area; flags, help and docs are derived from these classes."""

from vllm.config.areas import (
    AttentionConfig,
    DeviceConfig,
    KVEventsConfig,
    LoadConfig,
    LoRAConfig,
    ObservabilityConfig,
    StructuredOutputsConfig,
)
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.config.current import (
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from vllm.config.eplb import EPLBConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.vllm import VllmConfig

__all__ = [
    "AttentionConfig",
    "CUDAGraphMode",
    "CacheConfig",
    "CompilationConfig",
    "CompilationMode",
    "DeviceConfig",
    "EPLBConfig",
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
