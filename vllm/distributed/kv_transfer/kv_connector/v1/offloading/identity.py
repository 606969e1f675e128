# SPDX-License-Identifier: Apache-2.0
"""Everything besides the tokens that fixes the content of a stored block."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def store_identity(vllm_config: VllmConfig, config: KVCacheConfig) -> dict[str, Any]:
    """What two engines must have in common to share files; JSON values."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        "engine": __version__,
        "model": str(model.model),
        "revision": str(model.revision),
        "weights": _weights(str(model.model)),
        "load_format": vllm_config.load_config.load_format,
        "seed": model.seed,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "speculation": None if speculative is None else str(speculative.method),
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "groups": [
            {
                "spec": repr(group.kv_cache_spec),
                "layers": list(group.layer_names),
                "block_bytes": plan.block_bytes,
                "offsets": list(plan.layer_offsets.values()),
            }
            for group, plan in zip(config.kv_cache_groups, config.plan.groups, strict=True)
        ],
    }


def _weights(model: str) -> list[list[Any]]:
    """Name, size and time of change of a local checkpoint's files: another training run may write
    to the same directory."""
    directory = Path(model)
    if not directory.is_dir():
        return []
    files = sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".json"))
    return [[p.name, (stat := p.stat()).st_size, stat.st_mtime_ns] for p in files]
