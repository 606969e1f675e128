# SPDX-License-Identifier: Apache-2.0
"""Cache writes on the CPU: `csrc/cpu/kernels/rope_cache.cpp`."""

from torch import Tensor

from vllm._extension import cpu_ops

_ops = cpu_ops()
write_rows = _ops.write_rows.default
_write_kv_cache = _ops.write_kv_cache.default


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Float8 caches are refused, so their scales have no use."""
    _write_kv_cache(key, value, kv_cache, slot_mapping)
