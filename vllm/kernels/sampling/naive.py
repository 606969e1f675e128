# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens in plain torch.

Filters: top-k, top-p (nucleus, arXiv 1904.09751), min-p (arXiv 2407.01082). Draws: the Gumbel-max
trick with counter-based noise, which depends on the request's seed and the token's position alone:
never on the batch, the schedule or a preemption, so any draw can be repeated. The noise is one
platform's own.
"""

import torch
from torch import Tensor

from vllm.kernels.sampling import DrawProblem
from vllm.v1.outputs import NO_TOKEN

_MASK = (1 << 64) - 1
_WORD_BITS = 32


def argmax_rows(logits: Tensor) -> Tensor:
    """The first of each row's largest `logits [n, vocab]` -> `[n]` int64; `NO_TOKEN` where all are
    -inf or some are NaN. The order of 16-bit logits is that of their fp32 values.
    """
    best, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(~(best > float("-inf")), NO_TOKEN)


def best_rows(logits: Tensor, first: int, vocab_size: int) -> Tensor:
    """`argmax_rows` of the part `logits [n, tokens]` of a vocabulary that begins with token
    `first`, as `first_best` takes it: the best logit and its token, `vocab_size` without one, both
    fp64, `[n, 2]`."""
    best, tokens = logits.max(dim=-1)
    tokens = (tokens + first).masked_fill_(~(best > float("-inf")), vocab_size)
    return torch.stack([best.double(), tokens.double()], dim=-1)


def best_draws(problem: DrawProblem, first: int, vocab_size: int) -> Tensor:
    """`best_rows` of the scores whose largest over a whole vocabulary is what `draw_tokens` takes:
    `problem` has the logits `[n, tokens]` of a part and no filters."""
    p = problem
    scaled = p.logits.float() / p.temperature.masked_fill(p.temperature == 0, 1.0).unsqueeze(1)
    noisy = _noisy(scaled, p.temperature, p.seeds, p.positions, first, vocab_size)
    return best_rows(noisy, first, vocab_size)


def first_best(told: Tensor, vocab_size: int) -> Tensor:
    """The first token of each row's largest value, `[n]` int64, of what every part's `best_rows`
    told, `[parts, n, 2]`; `NO_TOKEN` where no value is above -inf, or one is NaN."""
    values, ids = told.unbind(dim=-1)
    best = values.amax(dim=0)
    first = ids.masked_fill(values != best, vocab_size).amin(dim=0)
    return first.masked_fill(~(best > float("-inf")) | (first >= vocab_size), NO_TOKEN).long()


def draw_tokens(problem: DrawProblem) -> Tensor:
    """One token per row -> `[n]` int64, `NO_TOKEN` for a row without a finite logit."""
    p = problem
    divisor = p.temperature.masked_fill(p.temperature == 0, 1.0)
    scaled = p.logits.float() / divisor.unsqueeze(1)
    if p.min_p is not None:
        scaled = apply_min_p(scaled, p.min_p)
    scaled = apply_top_k_top_p(scaled, p.top_k, p.top_p)
    return gumbel_sample(scaled, p.temperature, p.seeds, p.positions)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set barred tokens of `logits [n, vocab]` to -inf, in place; `rows [m]` int64, `words
    [m, ceil(vocab / 32)]` int32: bit `t % 32` of word `t // 32` allows token t."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    barred = ((words.unsqueeze(-1) >> shifts) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    chosen = logits.index_select(0, rows).masked_fill_(barred, float("-inf"))
    logits.index_copy_(0, rows, chosen)


def ranked_logprobs(
    logits: Tensor, chosen: Tensor, num_logprobs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`(token_ids [n, k + 1], logprobs [n, k + 1], ranks [n])` of `softmax(logits)`.

    `logits [n, vocab]` up to fp32, `chosen [n]` int64 (column 0), `num_logprobs` k likeliest
    tokens (the other columns, most likely first). int32, fp32, int32; rank 1 is the likeliest.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    ids = chosen.unsqueeze(1)
    ranks = (logits > logits.gather(1, ids)).sum(dim=-1) + 1
    top, top_ids = logprobs.topk(num_logprobs, dim=-1)
    values = torch.cat([logprobs.gather(1, ids), top], dim=1)
    return torch.cat([ids, top_ids], dim=1).int(), values, ranks.int()


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than `min_p [n]` times the most likely one; `logits [n, vocab]`."""
    odds = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return logits.masked_fill(odds < min_p.unsqueeze(1), float("-inf"))


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the `top_k [n]` likeliest tokens, then the smallest set with mass `top_p [n]`.

    Ties with the least likely token kept are kept; the likeliest token always survives. A row with
    `top_p` 1 or `top_k` of the vocabulary's size loses nothing, whatever the other rows ask for.
    """
    if top_k is None and top_p is None:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    if top_k is not None:
        kth = ordered.gather(1, (top_k - 1).unsqueeze(1))
        ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    if top_p is not None:
        probs = ordered.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        drop = (mass_before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1)
        drop[:, 0] = False
        lowest = ordered.masked_fill(drop, float("inf")).amin(dim=-1, keepdim=True)
        ordered = ordered.masked_fill(ordered < lowest, float("-inf"))
    return ordered.new_empty(ordered.shape).scatter_(1, index, ordered)


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample one token per row -> `[n]` int64, `NO_TOKEN` where there is none.

    `logits [n, vocab]` fp32, already divided by the temperature and filtered; `temperature [n]`
    fp32, rows with 0 take the argmax; `seeds, positions [n]` int64.
    """
    return argmax_rows(_noisy(logits, temperature, seeds, positions, 0, logits.shape[1]))


def _noisy(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int,
    vocab_size: int,
) -> Tensor:
    noisy = logits.clone()
    rows = zip(temperature.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    for row, (row_temperature, seed, position) in enumerate(rows):
        if row_temperature > 0:
            noise = _noise(seed, position, vocab_size)
            noisy[row] += noise[first : first + logits.shape[1]]
    return noisy


def _noise(seed: int, position: int, size: int) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(_mix(seed, position))
    return -torch.empty(size).exponential_(generator=generator).log()


def _mix(seed: int, position: int) -> int:
    """SplitMix64 finaliser over (seed, position): neighbours in either get unrelated streams."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & ((1 << 63) - 1)
