# SPDX-License-Identifier: Apache-2.0
"""Head norms, rotation and the cache write in plain torch: what every platform computes."""

import torch
from torch import Tensor

from vllm.kernels.cache.naive import write_kv_cache
from vllm.kernels.norm.naive import accumulation_dtype, rms_norm
from vllm.kernels.rotary import RotaryProblem


def qk_norm_rope_cache(p: RotaryProblem) -> Tensor:
    """Write keys and values to the cache; returns q `[tokens, num_heads, head_dim]`."""
    q_width, kv_width = p.head_dim * (2 if p.gated else 1), p.num_kv_heads * p.head_dim
    q, k, v = p.qkv.split([p.num_heads * q_width, kv_width, kv_width], dim=-1)
    q = q.unflatten(-1, (p.num_heads, q_width))[..., : p.head_dim]
    k, v = (x.unflatten(-1, (p.num_kv_heads, p.head_dim)) for x in (k, v))
    if p.q_norm_weight is not None:
        q = rms_norm(q, p.q_norm_weight, p.eps, one_plus=p.one_plus)
    if p.k_norm_weight is not None:
        k = rms_norm(k, p.k_norm_weight, p.eps, one_plus=p.one_plus)
    angles = p.cos_sin[p.positions]
    k = rotate(k, angles)
    write_kv_cache(k, v, p.kv_cache, p.slot_mapping, k_scale=p.k_scale, v_scale=p.v_scale)
    return rotate(q, angles).contiguous()


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first `rot` dims of `x [tokens, heads, n]` by `cos_sin [tokens, rot]`.

    NeoX halves: dim `i` pairs with `i + rot / 2` (RoFormer, arXiv 2104.09864, eq. 34).
    """
    wide = accumulation_dtype(x)
    rot = cos_sin.shape[-1]
    cos, sin = cos_sin.to(wide)[:, None].chunk(2, dim=-1)
    first, second, rest = x.split([rot // 2, rot // 2, x.shape[-1] - rot], dim=-1)
    first, second = first.to(wide), second.to(wide)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
