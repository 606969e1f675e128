# SPDX-License-Identifier: Apache-2.0
"""From each rank's logits to the same tokens on every rank, without gathering the logits.

A draw is the largest noisy score, whose noise is a function of the request, the position and the
token, so each rank takes the best of its own tokens and the best of these is the draw. The filters
are thresholds: top-k's is among the k largest logits of each rank, min-p's follows from the largest
of all, and top-p's from the masses that top-k leaves. What top-p leaves of a whole vocabulary does
not follow from a few tokens per rank: such rows are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.kernels.sampling import DrawProblem
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import MOST_BEST, SamplingMetadata
from vllm.v1.sample.vocab_shard import VocabShard


def draw_sharded(
    own: Tensor, metadata: SamplingMetadata, positions: Tensor, shard: VocabShard
) -> Tensor:
    """One token per row `[n]` int64, of which each rank has `own [n, size]`: `argmax_rows` or
    `draw_tokens` of the whole rows. `positions [n]` int64 of the tokens to sample."""
    kernels, m = current_platform.kernels, metadata
    if m.temperature is None or m.seeds is None:
        return shard.best(own)
    kept = own
    if (m.top_k, m.min_p) != (None, None):
        kept = own.masked_fill(_dropped(own, m.temperature, m, shard), -torch.inf)
    problem = DrawProblem(kept, m.temperature, m.seeds, positions)
    told = kernels.best_draws(problem, shard.first, shard.vocab_size)
    tokens = shard.first_best(told)
    if m.gathered_rows is None:
        return tokens
    rows = m.gathered_rows
    whole = shard.whole(own.index_select(0, rows))
    return tokens.index_copy(0, rows, kernels.draw_tokens(_problem_of(whole, m, positions, rows)))


def _problem_of(
    logits: Tensor, metadata: SamplingMetadata, positions: Tensor, rows: Tensor
) -> DrawProblem:
    def chosen(column: Tensor | None) -> Tensor | None:
        return None if column is None else column.index_select(0, rows)

    m = metadata
    assert m.temperature is not None and m.seeds is not None
    return DrawProblem(
        logits,
        m.temperature.index_select(0, rows),
        m.seeds.index_select(0, rows),
        positions.index_select(0, rows),
        chosen(m.top_k),
        chosen(m.top_p),
        chosen(m.min_p),
        m.top_p_alone,
    )


def _dropped(
    own: Tensor, temperature: Tensor, metadata: SamplingMetadata, shard: VocabShard
) -> Tensor:
    """Which tokens min-p, then top-k, then top-p drop, `[n, size]`; rows that are gathered aside.

    As in the reference: a threshold on `logits / temperature`, ties with it are kept.
    """
    m = metadata
    scaled = own.float() / temperature.masked_fill(temperature == 0, 1.0).unsqueeze(1)
    ordered, _ = shard.candidates(scaled, max(1, m.largest_top_k))
    peak = ordered[:, :1]
    dropped = torch.zeros_like(own, dtype=torch.bool)
    if m.min_p is not None:
        floor = m.min_p.unsqueeze(1)
        dropped = (scaled - peak).exp() < floor
        ordered = ordered.masked_fill((ordered - peak).exp() < floor, -torch.inf)
    if m.top_k is None:
        return dropped
    top_k, largest = m.top_k.unsqueeze(1), max(1, m.largest_top_k)
    lowest = ordered.gather(1, top_k.clamp(max=largest) - 1)
    lowest = lowest.masked_fill(top_k > m.largest_top_k, -torch.inf)
    if m.top_p is not None:
        beyond = _beyond(scaled, dropped, ordered, lowest, shard)
        ordered = ordered.masked_fill(ordered < lowest, -torch.inf)
        lowest = torch.maximum(lowest, _lowest_of_mass(ordered, lowest, beyond, m.top_p))
    return dropped | (scaled < lowest)


def _beyond(
    scaled: Tensor, dropped: Tensor, ordered: Tensor, lowest: Tensor, shard: VocabShard
) -> Tensor:
    """How many tokens tie with the least likely one of top-k, `lowest [n, 1]`, and are not among
    the candidates `ordered [n, m]`: `[n, 1]`."""
    kept = shard.total(((scaled >= lowest) & ~dropped).sum(dim=1, keepdim=True))
    known = (ordered >= lowest).sum(dim=1, keepdim=True)
    return (kept - known).masked_fill(lowest == -torch.inf, 0)


def _lowest_of_mass(ordered: Tensor, lowest: Tensor, beyond: Tensor, top_p: Tensor) -> Tensor:
    """The least likely token of the smallest set with mass `top_p [n]`, `[n, 1]`, among those of
    `ordered [n, m]`, in descending order, and `beyond [n, 1]` more that equal `lowest [n, 1]`; -inf
    where that is all of them, for then there may be others."""
    peak, limit = ordered[:, :1], top_p.unsqueeze(1)
    mass = (ordered - peak).exp()
    ties = (beyond * (lowest - peak).exp()).masked_fill(beyond == 0, 0.0)
    probs = mass / (mass.sum(dim=1, keepdim=True) + ties)
    drop = probs.cumsum(dim=1) - probs >= limit
    drop[:, :1].fill_(False)
    least = ordered.masked_fill(drop, torch.inf).amin(dim=1, keepdim=True)
    return least.masked_fill(limit >= 1.0, -torch.inf)


def logprobs_sharded(
    own: Tensor, chosen: Tensor, num_logprobs: int, shard: VocabShard
) -> LogprobsTensors:
    """`ranked_logprobs` of the whole rows, of which each rank has `own [n, size]`, unprocessed;
    `chosen [n]` int64 counts the whole vocabulary."""
    if num_logprobs > MOST_BEST:
        whole = shard.whole(own)
        kernels = current_platform.kernels
        return LogprobsTensors(*kernels.ranked_logprobs(whole, chosen, num_logprobs))
    wide = own.float()
    peak = wide.amax(dim=1)
    mass = (wide - peak.masked_fill(peak == -torch.inf, 0.0).unsqueeze(1)).exp().sum(dim=1)
    place = chosen - shard.first
    is_own = (place >= 0) & (place < shard.size)
    value = wide.gather(1, place.clamp(0, wide.shape[1] - 1).unsqueeze(1)).squeeze(1)
    value = value.masked_fill(~is_own, -torch.inf)
    peaks, masses, values = shard.of_ranks(torch.stack([peak, mass, value]).double()).unbind(1)
    highest = peaks.amax(dim=0)
    norm = highest + ((peaks - highest).exp() * masses).sum(dim=0).log()
    logit = values.amax(dim=0)
    above = shard.total((wide > logit.float().unsqueeze(1)).sum(dim=1))
    ids, logits = chosen.unsqueeze(1), logit.unsqueeze(1)
    if num_logprobs:
        top, top_ids = (x[:, :num_logprobs] for x in shard.candidates(wide, num_logprobs))
        ids, logits = torch.cat([ids, top_ids], dim=1), torch.cat([logits, top.double()], dim=1)
    return LogprobsTensors(ids.int(), (logits - norm.unsqueeze(1)).float(), (above + 1).int())
