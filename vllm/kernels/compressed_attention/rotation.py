# SPDX-License-Identifier: Apache-2.0
"""Rotation of the last dimensions, in pairs of neighbours (RoFormer, arXiv 2104.09864, eq. 34)."""

import torch
from torch import Tensor

from vllm.kernels.norm.naive import accumulation_dtype


def rotate_pairs(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """`x [tokens, ..., n]` with its last `rot` dimensions turned by `cos_sin [tokens, rot]`, which
    has the cosines first; `inverse`: turned back."""
    wide, rot = accumulation_dtype(x), cos_sin.shape[-1]
    angles = cos_sin.to(wide).view(len(x), *[1] * (x.dim() - 2), rot)
    cos, sin = angles.chunk(2, dim=-1)
    if inverse:
        sin = -sin
    kept, turning = x.split([x.shape[-1] - rot, rot], dim=-1)
    first, second = turning.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([kept, turned.flatten(-2).to(x.dtype)], dim=-1)
