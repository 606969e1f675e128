# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Token choice over rows of logits: argmax, and sampling by the Gumbel maximum.

`argmax(logits / T + G)` with Gumbel noise `G` draws from `softmax(logits / T)` (Gumbel, 1954). The
noise is Philox4x32-10 (Salmon et al., 2011) keyed by the request's seed and counted by position
and token id, so a draw depends on neither the batch nor the launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANE = 1024
TARGET_PROGRAMS = 512


@triton.jit
def _better(score, index, best, best_index):
    """The larger score, and of equal scores the smaller index."""
    take = (score > best) | ((score == best) & (index < best_index))
    return tl.where(take, score, best), tl.where(take, index, best_index)


@triton.jit
def _exponential(bits):
    """Standard exponential noise from uint32 bits, accurate for small values too."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return tl.where(u < 1e-3, small, -tl.log(tl.maximum(1.0 - u, 1e-30)))


@triton.jit(do_not_specialize=["span"])
def _partial_argmax_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    score_ptr,
    index_ptr,
    stride_row,
    span,
    VOCAB: tl.constexpr,
    SAMPLE: tl.constexpr,
    LANE: tl.constexpr,
):
    """Grid (rows, splits): the best of `span` scores. Token `i` takes Philox output
    `i // LANE % 4` of counter `i // (4 * LANE) * LANE + i % LANE`."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits = logits_ptr + row * stride_row
    lane = tl.arange(0, LANE)
    best = tl.full((LANE,), float("-inf"), tl.float32)
    best_index = tl.full((LANE,), VOCAB, tl.int32)
    temperature = 0.0
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    for start in range(split * span, min(split * span + span, VOCAB), 4 * LANE):
        start = tl.multiple_of(start, 4 * LANE)
        if SAMPLE:
            counter = (start // 4 + lane).to(tl.uint32)
            low = counter * 0 + position.to(tl.uint32)
            high = counter * 0 + (position >> 32).to(tl.uint32)
            bits = tl.philox(seed, counter, low, high, counter * 0)
        for i in tl.static_range(4):
            index = start + i * LANE + lane
            score = tl.load(logits + index, mask=index < VOCAB, other=float("-inf"))
            score = score.to(tl.float32)
            if SAMPLE:
                noise = -tl.log(_exponential(bits[i]))
                score = tl.where(temperature > 0, score * inverse + noise, score)
            best, best_index = _better(score, index, best, best_index)
    top = tl.max(best, axis=0)
    out = row * tl.num_programs(1) + split
    tl.store(score_ptr + out, top)
    tl.store(index_ptr + out, tl.min(tl.where(best == top, best_index, VOCAB), axis=0))


@triton.jit(do_not_specialize=["splits"])
def _argmax_reduce_kernel(
    score_ptr,
    index_ptr,
    out_ptr,
    splits,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score = tl.load(score_ptr + row * splits + i, mask=i < splits, other=float("-inf"))
    index = tl.load(index_ptr + row * splits + i, mask=i < splits, other=VOCAB)
    best = tl.min(tl.where(score == tl.max(score, axis=0), index, VOCAB), axis=0)
    tl.store(out_ptr + row, tl.minimum(best, VOCAB - 1).to(tl.int64))


def _best_tokens(
    logits: Tensor, temperature: Tensor | None, seeds: Tensor | None, positions: Tensor | None
) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    tile = 4 * LANE
    tiles = triton.cdiv(vocab, tile)
    span = triton.cdiv(tiles, max(1, min(tiles, TARGET_PROGRAMS // rows))) * tile
    splits = triton.cdiv(vocab, span)
    scores = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    _partial_argmax_kernel[(rows, splits)](
        logits,
        temperature,
        seeds,
        positions,
        scores,
        indices,
        logits.stride(0),
        span,
        VOCAB=vocab,
        SAMPLE=temperature is not None,
        LANE=LANE,
    )
    _argmax_reduce_kernel[(rows,)](
        scores, indices, out, splits, VOCAB=vocab, BLOCK=triton.next_power_of_2(tiles)
    )
    return out


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of each row's largest value, the first of equals: `[n, vocab] -> int64 [n]`."""
    return _best_tokens(logits, None, None, None)


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One draw per row from `softmax(logits / temperature)`; temperature 0 takes the argmax.

    `logits [n, vocab]`, `temperature [n]` fp32, `seeds, positions [n]` int64 -> int64 `[n]`.
    """
    return _best_tokens(logits, temperature, seeds, positions)
