# SPDX-License-Identifier: Apache-2.0
"""Layout of paged caches."""

from vllm import envs


def get_kv_cache_layout() -> str:
    """Axis order of a block: "NHD" (tokens, heads, head size), the one this engine stores.

    Raises ValueError when `VLLM_KV_CACHE_LAYOUT` asks for another.
    """
    asked = envs.VLLM_KV_CACHE_LAYOUT
    if asked not in (None, "NHD"):
        raise ValueError(f"VLLM_KV_CACHE_LAYOUT={asked} is not supported; use NHD")
    return "NHD"
