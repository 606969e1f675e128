# SPDX-License-Identifier: Apache-2.0
"""Scatter of token rows into paged caches in plain torch: what every platform computes."""

from torch import Tensor

from vllm.kernels.fp8 import FP8, to_fp8


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write `key, value [tokens, num_kv_heads, head_dim]` to the paged cache.

    A float8 cache (e4m3) holds `key / k_scale` and `value / v_scale`, rounded to nearest even
    and saturated; the scales are used with such caches only.
    """
    if kv_cache.dtype is FP8:
        key = to_fp8(key.float() * (1 / k_scale))
        value = to_fp8(value.float() * (1 / v_scale))
    write_rows(key, kv_cache[:, 0], slot_mapping)
    write_rows(value, kv_cache[:, 1], slot_mapping)


def write_rows(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `rows [tokens, columns, width]`, captured hidden states, to their paged cache.

    `cache [num_blocks, block_size, columns, width]`, `slot_mapping [tokens]` int64.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows[keep].to(cache.dtype)
