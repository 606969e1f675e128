# SPDX-License-Identifier: Apache-2.0
"""Per-head norm, rotary embedding and the cache write: all between projection and attention."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RotaryProblem:
    """What `Kernels.qk_norm_rope_cache` computes.

    `qkv [tokens, num_heads * head_dim * (2 if gated else 1) + 2 * num_kv_heads * head_dim]`;
    when gated each query head is `[q head_dim | gate head_dim]`. Optional per-head RMS norm
    of q and k (weights `[head_dim]`), then NeoX-style rotation of the first `rot` dims by
    `cos_sin [max_position, rot]` fp32 (`rot/2` cosines, then `rot/2` sines) at
    `positions [tokens]` int64. k and v are written to `kv_cache
    [num_blocks, 2, block_size, num_kv_heads, head_dim]` at `slot_mapping [tokens]` int64; a float8
    cache takes `k / k_scale` and `v / v_scale`. Rotation maths: RoFormer (arXiv 2104.09864).
    """

    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    kv_cache: Tensor
    slot_mapping: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool
    eps: float
    one_plus: bool
    k_scale: float = 1.0
    v_scale: float = 1.0
