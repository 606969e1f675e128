# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Device functions shared by the chunked and the recurrent kernels."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, accurate where the result is tiny: slow decays live there."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def step_size(dt, bias, low, high):
    """`clamp(softplus(dt + bias), low, high)` in fp32."""
    size = softplus(dt.to(tl.float32) + bias)
    return tl.minimum(tl.maximum(size, low), high)


@triton.jit
def gate(a, b, A_log_ptr, dt_bias_ptr, head, COMPUTE: tl.constexpr, BETA: tl.constexpr):
    """`(g, beta)` fp32 from the projections, or `(a, b)` themselves when already gates.

    `BETA`: the largest `beta` there may be.
    """
    a, b = a.to(tl.float32), b.to(tl.float32)
    if COMPUTE:
        A_log = tl.load(A_log_ptr + head).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        return -tl.exp(A_log) * softplus(a + dt_bias), tl.sigmoid(b) * BETA
    else:
        return a, b


@triton.jit
def inverse_norm(x, L2NORM: tl.constexpr):
    """`rsqrt(sum(x^2) + 1e-6)` over the last axis, or ones."""
    x = x.to(tl.float32)
    squares = tl.sum(x * x, axis=len(x.shape) - 1)
    if L2NORM:
        return tl.rsqrt(squares + 1e-6)
    else:
        return squares * 0.0 + 1.0


@triton.jit
def chunk_bounds(chunk_ptr, starts_ptr, chunk, BT: tl.constexpr):
    """`(first token int64, tokens)` of a chunk listed in `chunk_indices`."""
    seq = tl.load(chunk_ptr + 2 * chunk)
    start = tl.load(starts_ptr + seq) + tl.load(chunk_ptr + 2 * chunk + 1) * BT
    length = tl.minimum(tl.load(starts_ptr + seq + 1) - start, BT)
    return start.to(tl.int64), length
