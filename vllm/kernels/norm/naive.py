# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms (arXiv 1910.07467) in plain torch: what every platform computes."""

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalise(x: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps)` over the last dimension, in the accumulation dtype."""
    wide = x.to(accumulation_dtype(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
    """`x [..., n]` normalised over the last dimension by `rsqrt(mean(x^2) + eps)`.

    `one_plus=False`: the normalised value is rounded to `x.dtype`, then times `weight [n]`
    (Llama, Qwen3). `one_plus=True`: fp32 `norm(x) * (1 + weight)`, rounded once (Qwen3.5).
    `x` may have arbitrary leading strides (per-head views of a projection).
    """
    y = normalise(x, eps)
    if one_plus:
        return (y * (1 + weight.to(y.dtype))).to(x.dtype).contiguous()
    return (y.to(x.dtype) * weight).to(x.dtype).contiguous()


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(s), s)` with `s = x + residual` rounded to the model dtype; all `[tokens, n]`.

    Both results are fresh tensors: `s` is the residual stream and may be captured as is.
    """
    total = x + residual
    return rms_norm(total, weight, eps, one_plus=one_plus), total


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    done: Tensor | None = None,
) -> Tensor:
    """`(round(norm(x)) * weight) * silu(gate)` per head; gate activation in fp32.

    `x [tokens, heads, n]`, `gate [tokens, heads, n]` (any token stride), `weight [n]`
    -> `[tokens, heads * n]`, in `out` (dense, may be `x`) if it is given. Of the first tokens,
    those whose entry of `done [up to tokens]` int32 is not negative stay as they are in `out`.
    """
    y = normalise(x, eps).to(x.dtype) * weight
    silu = torch.nn.functional.silu(gate.to(accumulation_dtype(gate)))
    normed = (y.to(silu.dtype) * silu).to(x.dtype).flatten(1)
    return normed if out is None else put_rows(out, normed.view(out.shape), done).flatten(1)


def put_rows(out: Tensor, rows: Tensor, done: Tensor | None) -> Tensor:
    """Fill `out [tokens, ...]`, but for the first tokens whose entry of `done` is not negative."""
    if done is None:
        return out.copy_(rows)
    head = out[: len(done)]
    kept = (done >= 0).view(-1, *[1] * (out.dim() - 1))
    head.copy_(head.where(kept, rows[: len(done)]))
    out[len(done) :] = rows[len(done) :]
    return out
