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
from triton.language.extra import libdevice

from vllm.kernels.sampling import DrawProblem
from vllm.kernels.sampling.filter import TILE, Kept, kept_tokens
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.v1.outputs import NO_TOKEN

LANE = TILE // 4
ARGMAX_TILE = 4096
#: parts of a vocabulary that are compared at once
PARTS = 16
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """Natural logarithm; FAST: by the hardware's, whose error is 2e-7 near 1."""
    if FAST:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _gumbel(bits, FAST: tl.constexpr):
    """Gumbel noise from uint32 bits: `-log(E)`, `E = -log(1 - u)` exponential.

    A series gives `E` where `1 - u` would lose its digits.
    """
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exponential = -_log(tl.maximum(1.0 - u, 1e-30), FAST)
    return -_log(tl.where(u < 0.0625, series, exponential), FAST)


@triton.jit
def _store_best(score_ptr, index_ptr, place, score, index, VOCAB: tl.constexpr):
    """The first of a tile's largest scores; `VOCAB` where all are NaN."""
    top = tl.max(score, axis=0)
    tl.store(score_ptr + place, top)
    tl.store(index_ptr + place, tl.min(tl.where(score == top, index, VOCAB), axis=0))


@triton.jit
def _partial_argmax_kernel(
    logits_ptr, score_ptr, index_ptr, stride_row, VOCAB: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Grid (tiles, rows): the best of `TILE` logits, all loaded at once."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    logits = logits_ptr + row * stride_row
    score = tl.load(logits + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    place = row * tl.num_programs(0) + tl.program_id(0)
    _store_best(score_ptr, index_ptr, place, score, index, VOCAB)


_partial_argmax = Launcher(_partial_argmax_kernel)


@triton.jit
def _partial_draw_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    lowest_ptr,
    peak_ptr,
    score_ptr,
    index_ptr,
    stride_row,
    first,
    VOCAB: tl.constexpr,
    FILTERED: tl.constexpr,
    FAST: tl.constexpr,
    LANE: tl.constexpr,
):
    """Grid (tiles, rows): the best of `4 * LANE` noisy scores. Token `i` takes Philox output
    `i // LANE % 4` of counter `i // (4 * LANE) * LANE + i % LANE`. The logits are those of tokens
    from `first` on, and tiles those of the vocabulary from the one of `first` on."""
    row = tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(0) + tl.program_id(0)
    lowest = float("-inf")
    if FILTERED:
        lowest = tl.load(lowest_ptr + row)
        if tl.load(peak_ptr + place) < lowest:
            tl.store(score_ptr + place, float("-inf"))
            tl.store(index_ptr + place, VOCAB)
            return
    start = (first // (4 * LANE) + tl.program_id(0)) * 4 * LANE
    lane = tl.arange(0, LANE)
    logits = logits_ptr + row * stride_row
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    counter = (start // 4 + lane).to(tl.uint32)
    low = counter * 0 + position.to(tl.uint32)
    high = counter * 0 + (position >> 32).to(tl.uint32)
    bits = tl.philox(seed, counter, low, high, counter * 0)
    best = tl.full((LANE,), float("-inf"), tl.float32)
    best_index = tl.full((LANE,), VOCAB, tl.int32)
    for i in tl.static_range(4):
        index = start - first + i * LANE + lane
        there = (index >= 0) & (index < VOCAB)
        score = tl.load(logits + index, mask=there, other=float("-inf"))
        score = score.to(tl.float32)
        if FILTERED:
            score = tl.where(score >= lowest, score, float("-inf"))
        if temperature > 0:
            score = score * (1.0 / temperature) + _gumbel(bits[i], FAST)
        # Later lanes hold larger tokens, so only a larger score replaces one.
        best_index = tl.where(score > best, index, best_index)
        best = tl.maximum(best, score)
    _store_best(score_ptr, index_ptr, place, best, best_index, VOCAB)


@triton.jit
def _best_tile(score_ptr, index_ptr, row, splits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The score of the row's best tile, and its token, `VOCAB` without one."""
    i = tl.arange(0, BLOCK)
    score = tl.load(score_ptr + row * splits + i, mask=i < splits, other=float("-inf"))
    index = tl.load(index_ptr + row * splits + i, mask=i < splits, other=VOCAB)
    top = tl.max(score, axis=0)
    return top, tl.min(tl.where(score == top, index, VOCAB), axis=0)


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
    top, best = _best_tile(score_ptr, index_ptr, row, splits, VOCAB, BLOCK)
    found = (best < VOCAB) & (top > float("-inf"))
    tl.store(out_ptr + row, tl.where(found, best, _NO_TOKEN).to(tl.int64))


_argmax_reduce = Launcher(_argmax_reduce_kernel)


@triton.jit(do_not_specialize=["splits", "first", "vocab_size"])
def _tell_best_kernel(
    score_ptr,
    index_ptr,
    told_ptr,
    splits,
    first,
    vocab_size,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows): the best score, and its token of the vocabulary that `first` is one of."""
    row = tl.program_id(0).to(tl.int64)
    top, best = _best_tile(score_ptr, index_ptr, row, splits, VOCAB, BLOCK)
    found = (best < VOCAB) & (top > float("-inf"))
    tl.store(told_ptr + row * 2, tl.where(found, top, float("-inf")).to(tl.float64))
    tl.store(told_ptr + row * 2 + 1, tl.where(found, best + first, vocab_size).to(tl.float64))


_tell_best = Launcher(_tell_best_kernel)


@triton.jit(do_not_specialize=["parts", "rows", "vocab_size"])
def _first_best_kernel(told_ptr, out_ptr, parts, rows, vocab_size, BLOCK: tl.constexpr):
    """Grid (rows): the first token of the largest of what the parts told."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([], float("-inf"), tl.float64)
    best = tl.full([], 0, tl.int64) + vocab_size
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        told = told_ptr + (part * rows + row) * 2
        value = tl.load(told, mask=part < parts, other=float("-inf"))
        token = tl.load(told + 1, mask=part < parts, other=0.0).to(tl.int64)
        largest = tl.max(value, axis=0)
        first = tl.min(tl.where(value == largest, token, vocab_size), axis=0)
        # Later parts hold larger tokens, so only a larger value replaces one.
        best = tl.where(largest > top, first, best)
        top = tl.maximum(top, largest)
    tl.store(out_ptr + row, tl.where(best < vocab_size, best, _NO_TOKEN))


_merge_best = Launcher(_first_best_kernel)


def _best(scores: Tensor, indices: Tensor, vocab: int) -> Tensor:
    """The token of each row's best tile, `NO_TOKEN` without one: `[n, tiles] -> int64 [n]`."""
    rows, tiles = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        block = next_power_of_2(tiles)
        _argmax_reduce[(rows,)](scores, indices, out, tiles, VOCAB=vocab, BLOCK=block)
    return out


def _told(scores: Tensor, indices: Tensor, vocab: int, first: int, vocab_size: int) -> Tensor:
    rows, tiles = scores.shape
    told = torch.empty(rows, 2, dtype=torch.float64, device=scores.device)
    if rows:
        block = next_power_of_2(tiles)
        _tell_best[(rows,)](
            scores, indices, told, tiles, first, vocab_size, VOCAB=vocab, BLOCK=block
        )
    return told


def first_best(told: Tensor, vocab_size: int) -> Tensor:
    parts, rows, _ = told.shape
    out = torch.empty(rows, dtype=torch.int64, device=told.device)
    if rows:
        _merge_best[(rows,)](told, out, parts, rows, vocab_size, BLOCK=PARTS)
    return out


def _partials(rows: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    scores = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    return scores, torch.empty(rows, tiles, dtype=torch.int32, device=device)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best logit of every tile, and its token: `[n, tiles]`."""
    rows, vocab = logits.shape
    tiles = cdiv(vocab, ARGMAX_TILE)
    scores, indices = _partials(rows, tiles, logits.device)
    if rows:
        _partial_argmax[(tiles, rows)](
            logits, scores, indices, logits.stride(0), VOCAB=vocab, TILE=ARGMAX_TILE
        )
    return scores, indices


def argmax_rows(logits: Tensor) -> Tensor:
    return _best(*_largest(logits), logits.shape[1])


def best_rows(logits: Tensor, first: int, vocab_size: int) -> Tensor:
    return _told(*_largest(logits), logits.shape[1], first, vocab_size)


def draw_tokens(problem: DrawProblem) -> Tensor:
    p = problem
    kept = None
    if (p.top_k, p.top_p, p.min_p) != (None, None, None):
        kept = kept_tokens(
            p.logits, p.temperature, p.top_k, p.top_p, p.min_p, top_p_alone=p.top_p_alone
        )
    return gumbel_sample(p.logits, p.temperature, p.seeds, p.positions, kept)


def best_draws(problem: DrawProblem, first: int, vocab_size: int) -> Tensor:
    p = problem
    noisy = _noisy(p.logits, p.temperature, p.seeds, p.positions, None, first)
    return _told(*noisy, p.logits.shape[1], first, vocab_size)


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    kept: Kept | None = None,
) -> Tensor:
    """One draw per row from `softmax(logits / temperature)`; temperature 0 takes the argmax.

    `logits [n, vocab]`, `temperature [n]` fp32, `seeds, positions [n]` int64 -> int64 `[n]`,
    `NO_TOKEN` for a row without a finite logit. With
    `kept`, only among the tokens it keeps; filters change no token's noise.
    """
    return _best(*_noisy(logits, temperature, seeds, positions, kept, 0), logits.shape[1])


def _noisy(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    kept: Kept | None,
    first: int,
) -> tuple[Tensor, Tensor]:
    """The best noisy score of every tile, and its token, counted from `first`: `[n, tiles]`."""
    rows, vocab = logits.shape
    tiles = cdiv(first % (4 * LANE) + vocab, 4 * LANE)
    scores, indices = _partials(rows, tiles, logits.device)
    if rows:
        _partial_draw_kernel[(tiles, rows)](
            logits,
            temperature,
            seeds,
            positions,
            None if kept is None else kept.lowest,
            None if kept is None else kept.tile_peaks,
            scores,
            indices,
            logits.stride(0),
            first,
            VOCAB=vocab,
            FILTERED=kept is not None,
            FAST=logits.device.type == "cuda",
            LANE=LANE,
        )
    return scores, indices
