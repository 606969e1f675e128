# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of float8 weights and activations: the definition every platform follows.

Activations become e4m3 with a scale of their own: one per token, or one per token and 128 channels
(DeepSeek-V3, arXiv 2412.19437, section 3.3). Products are summed in fp32 and multiplied by both
scales. The functions here are plain torch: the reference, and the CPU's implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
#: channels that share an activation scale, and the side of a weight block
GROUP = 128


@dataclass(frozen=True)
class Fp8Rows:
    """Activations with one scale per token: what they stand for is `values * scale`.

    `values [tokens, k]` e4m3, `scale [tokens, 1]` fp32; `dtype`: the model's.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __getitem__(self, run: slice) -> Fp8Rows:
        return replace(self, values=self.values[run], scale=self.scale[run])


def padded_rows(tokens: int) -> int:
    """Rows of a group-quantised activation: a multiple of 4."""
    return -(-tokens // 4) * 4


def to_fp8(x: Tensor) -> Tensor:
    """Round to nearest even, saturating at +-448; NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _quantize(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Scale so that `amax` becomes 448; where it is 0 the scale is 1."""
    one = torch.ones_like(amax)
    # A tensor, not a number: CUDA would multiply by a number's reciprocal.
    largest = torch.full_like(amax, FP8_MAX)
    inverse = torch.where(amax > 0, largest / amax, one)
    return to_fp8(x * inverse), torch.where(amax > 0, amax / largest, one)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [rows, k]` -> `(e4m3 [rows, k], scale [rows, 1] fp32)`, each row's largest value 448."""
    wide = x.float()
    return _quantize(wide, wide.abs().amax(-1, keepdim=True))


def as_rows(x: Tensor | Fp8Rows, fixed: Tensor | None = None) -> Fp8Rows:
    """`x`, quantised if it is not yet: by the scale `fixed [1]`, if given."""
    if isinstance(x, Fp8Rows):
        return x
    if fixed is not None:
        return Fp8Rows(quantize_by(x, fixed), fixed.expand(len(x), 1), x.dtype)
    return Fp8Rows(*quantize_rows(x), x.dtype)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [rows, k]` -> `(e4m3 [rows, k], scale [rows, ceil(k / 128)] fp32)`."""
    rows, k = x.shape
    groups = -(-k // GROUP)
    wide = torch.nn.functional.pad(x.float(), (0, groups * GROUP - k)).view(rows, groups, GROUP)
    q, scale = _quantize(wide, wide.abs().amax(-1, keepdim=True))
    return q.view(rows, -1)[:, :k].contiguous(), scale.squeeze(-1)


def quantize_by(x: Tensor, scale: Tensor) -> Tensor:
    """`x / scale` as e4m3; `scale` is a checkpoint's fixed activation scale, one element."""
    return to_fp8(x.float() / scale)
