# SPDX-License-Identifier: Apache-2.0
"""Plain torch norms, gates and rotary embedding."""

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalise(x: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps)` over the last dimension, in the accumulation dtype."""
    wide = x.to(accumulation_dtype(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """`x [..., n]`, `weight [n]`; the two roundings of `Kernels.rms_norm`."""
    y = normalise(x, eps)
    if one_plus:
        return (y * (1 + weight.to(y.dtype))).to(x.dtype)
    return (y.to(x.dtype) * weight).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x, gate [tokens, heads, n]` -> `[tokens, heads * n]`."""
    y = normalise(x, eps).to(x.dtype) * weight
    silu = torch.nn.functional.silu(gate.to(accumulation_dtype(gate)))
    return (y.to(silu.dtype) * silu).to(x.dtype).flatten(1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`[tokens, 2n] -> [tokens, n]`, rounded once."""
    gate, up = gate_up.to(accumulation_dtype(gate_up)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """`x, gate [tokens, heads, n]` -> `[tokens, heads * n]`, rounded once."""
    wide = accumulation_dtype(x)
    return (x.to(wide) * torch.sigmoid(gate.to(wide))).to(x.dtype).flatten(1)


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
