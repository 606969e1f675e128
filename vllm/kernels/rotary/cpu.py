# SPDX-License-Identifier: Apache-2.0
"""Head norms, rotation and the cache write on the CPU: `csrc/cpu/kernels/rope_cache.cpp`."""

from torch import Tensor

from vllm._extension import cpu_ops
from vllm.kernels.rotary import RotaryProblem

_qk_norm_rope_cache = cpu_ops().qk_norm_rope_cache.default


def qk_norm_rope_cache(p: RotaryProblem) -> Tensor:
    """Float8 caches are refused, so their scales have no use."""
    return _qk_norm_rope_cache(
        p.qkv,
        p.positions,
        p.cos_sin,
        p.q_norm_weight,
        p.k_norm_weight,
        p.kv_cache,
        p.slot_mapping,
        p.num_heads,
        p.num_kv_heads,
        p.head_dim,
        p.gated,
        p.eps,
        p.one_plus,
    )
