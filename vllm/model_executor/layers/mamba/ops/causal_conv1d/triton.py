# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Triton causal depthwise convolution with carried state: ragged prefill and one-token update."""

import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.configs import device_configs
from vllm.kernels.triton.launcher import Launcher
from vllm.kernels.triton.ragged import find_sequence, num_tiles
from vllm.utils.math_utils import cdiv, next_power_of_2

MAX_WIDTH = 4


def _check_width(weight: Tensor) -> int:
    width = weight.shape[1]
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"convolution width {width} is not supported; 2 to {MAX_WIDTH} are")
    return width


@triton.jit
def _silu(x):
    # exp2 and rsqrt are one instruction each; a sigmoid's exponential and quotient are ten.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * (root * root)


@triton.jit
def _load_taps(w_ptr, c, inside, WIDTH: tl.constexpr):
    """The weights of channels `c` as four fp32 vectors, by wide loads; the last is the newest
    row's, and zeros come before the oldest one's."""
    tap = tl.arange(0, 4)[None, :] - (4 - WIDTH)
    mask = inside[:, None] & (tap >= 0)
    w = tl.load(w_ptr + c[:, None] * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(w, (c.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _history(x, state, first, j: tl.constexpr, inside, carried, stride_x, CHANNELS, WIDTH):
    """Row `j - 3` before row `first` in fp32: of the sequence, else of its state, else zeros."""
    present = inside & (j >= 4 - WIDTH)
    row = tl.load(x + (first + j - 3) * stride_x, mask=present & (first > 0), other=0.0)
    kept = state + (j - 4 + WIDTH) * CHANNELS
    old = tl.load(kept, mask=present & (first == 0) & carried, other=0.0)
    return row.to(tl.float32) + old.to(tl.float32)


@triton.jit
def _load_rows(x, t, length, inside, stride_x):
    """Rows `t` to `t + 3`."""
    x0 = tl.load(x + t * stride_x, mask=inside & (t < length), other=0.0)
    x1 = tl.load(x + (t + 1) * stride_x, mask=inside & (t + 1 < length), other=0.0)
    x2 = tl.load(x + (t + 2) * stride_x, mask=inside & (t + 2 < length), other=0.0)
    x3 = tl.load(x + (t + 3) * stride_x, mask=inside & (t + 3 < length), other=0.0)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["num_seqs"])
def _conv_prefill_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    state_ptr,
    index_ptr,
    carried_ptr,
    starts_ptr,
    out_ptr,
    num_seqs,
    stride_x,
    stride_out,
    stride_block,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (token tiles, channel tiles). Rows pass through a window in registers, each read once.
    A sequence's first tile alone reads and writes its state, so no program can overwrite what
    another still needs. Tiles before the first sequence have nothing to do."""
    seq, tile = find_sequence(starts_ptr, tl.program_id(0), num_seqs, BLOCK_T)
    start = tl.load(starts_ptr + seq).to(tl.int64)
    length = (tl.load(starts_ptr + seq + 1) - start).to(tl.int32)
    index = tl.load(index_ptr + seq).to(tl.int64)
    first = tile * BLOCK_T
    if (index < 0) | (first < 0) | (first >= length):
        return
    carried = tl.load(carried_ptr + seq).to(tl.int1)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    x = x_ptr + start * stride_x + c
    out = out_ptr + start * stride_out + c
    state = state_ptr + index * stride_block + c
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    w0, w1, w2, w3 = _load_taps(w_ptr, c, inside, WIDTH)
    x0 = _history(x, state, first, 0, inside, carried, stride_x, CHANNELS, WIDTH)
    x1 = _history(x, state, first, 1, inside, carried, stride_x, CHANNELS, WIDTH)
    x2 = _history(x, state, first, 2, inside, carried, stride_x, CHANNELS, WIDTH)
    coming = _load_rows(x, first, length, inside, stride_x)
    for row in tl.static_range(0, BLOCK_T, 4):
        rows = coming
        # Before the stores: loads do not pass them.
        if row + 4 < BLOCK_T:
            coming = _load_rows(x, first + row + 4, length, inside, stride_x)
        for j in tl.static_range(4):
            t = first + row + j
            x3 = rows[j].to(tl.float32)
            y = bias + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
            tl.store(out + t * stride_out, _silu(y), mask=inside & (t < length))
            x0, x1, x2 = x1, x2, x3
    if tile == 0:
        tl.debug_barrier()
        for j in tl.static_range(WIDTH - 1):
            last = length - (WIDTH - 1) + j
            fresh = tl.load(x + last * stride_x, mask=inside & (last >= 0), other=0.0)
            kept = tl.load(
                state + (length + j) * CHANNELS, mask=inside & (last < 0) & carried, other=0.0
            )
            tl.store(state + j * CHANNELS, tl.where(last >= 0, fresh, kept), mask=inside)


_conv_prefill = Launcher(_conv_prefill_kernel)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    *,
    out: Tensor,
) -> None:
    """One launch.

    Raises:
        ValueError: a width outside 2 to 4.
    """
    tokens, channels = x.shape
    num_seqs = len(state_indices)
    if tokens == 0 or num_seqs == 0:
        return
    tile = device_configs(x.device).conv1d
    grid = (num_tiles(tokens, num_seqs, tile.rows), cdiv(channels, tile.columns))
    _conv_prefill[grid](
        x,
        weight,
        bias,
        conv_state,
        state_indices,
        has_initial_state,
        query_start_loc,
        out,
        num_seqs,
        x.stride(0),
        out.stride(0),
        conv_state.stride(0),
        CHANNELS=channels,
        WIDTH=_check_width(weight),
        BIAS=bias is not None,
        BLOCK_T=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )


@triton.jit
def _conv_update_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    state_ptr,
    index_ptr,
    out_ptr,
    stride_x,
    stride_out,
    stride_block,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (sequences, channel tiles); a channel stays in one thread, so the shift is in place."""
    seq = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + seq).to(tl.int64)
    if index < 0:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    state = state_ptr + index * stride_block + c
    acc = tl.zeros((BLOCK_C,), tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    taps = _load_taps(w_ptr, c, inside, WIDTH)
    for j in tl.static_range(WIDTH):
        if j < WIDTH - 1:
            row = tl.load(state + j * CHANNELS, mask=inside, other=0.0)
        else:
            row = tl.load(x_ptr + seq * stride_x + c, mask=inside, other=0.0)
        acc += row.to(tl.float32) * taps[j + 4 - WIDTH]
        if j > 0:
            tl.store(state + (j - 1) * CHANNELS, row, mask=inside)
    tl.store(out_ptr + seq * stride_out + c, _silu(acc), mask=inside)


def conv_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    out: Tensor,
) -> None:
    """One token per sequence: `x, out [num_seqs, channels]`; state as in `causal_conv1d`."""
    num_seqs, channels = x.shape
    if num_seqs == 0:
        return
    block_c = min(512, next_power_of_2(channels))
    _conv_update_kernel[(num_seqs, cdiv(channels, block_c))](
        x,
        weight,
        bias,
        conv_state,
        state_indices,
        out,
        x.stride(0),
        out.stride(0),
        conv_state.stride(0),
        CHANNELS=channels,
        WIDTH=_check_width(weight),
        BIAS=bias is not None,
        BLOCK_C=block_c,
        num_warps=2,
    )
