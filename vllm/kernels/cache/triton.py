# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Scatter of token rows into paged caches."""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.fp8 import FP8, to_fp8
from vllm.utils.math_utils import cdiv, next_power_of_2


@triton.jit
def _write_rows_kernel(
    rows_ptr,
    cache_ptr,
    slot_ptr,
    stride_token,
    stride_column,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    i = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(rows_ptr + token * stride_token + column * stride_column + i, mask=i < WIDTH)
    start = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    tl.store(cache_ptr + start + column * WIDTH + i, row, mask=i < WIDTH)


def write_rows(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    tokens, columns, width = rows.shape
    if tokens == 0:
        return
    block_w = min(1024, next_power_of_2(width))
    _write_rows_kernel[(tokens, columns, cdiv(width, block_w))](
        rows,
        cache,
        slot_mapping,
        rows.stride(0),
        rows.stride(1),
        cache.stride(0),
        cache.stride(1),
        BLOCK_SIZE=cache.shape[1],
        WIDTH=width,
        BLOCK_W=block_w,
        num_warps=4 if block_w >= 512 else 1,
    )


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    if kv_cache.dtype is FP8:
        key, value = to_fp8(key.float() * (1 / k_scale)), to_fp8(value.float() * (1 / v_scale))
    write_rows(key, kv_cache[:, 0], slot_mapping)
    write_rows(value, kv_cache[:, 1], slot_mapping)
