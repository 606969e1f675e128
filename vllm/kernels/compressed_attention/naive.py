# SPDX-License-Identifier: Apache-2.0
"""Compressed attention in plain torch: what every platform computes.

Shapes follow from host integers alone, so decodes can be captured: what a token does not see is
gathered and masked. Tokens are taken in pieces that bound what is gathered at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm.kernels.compressed_attention import (
    ChooseProblem,
    CompressedAttentionProblem,
    CompressProblem,
    PagedRows,
)
from vllm.kernels.compressed_attention.rotation import rotate_pairs
from vllm.kernels.norm.naive import accumulation_dtype, normalise
from vllm.utils.math_utils import cdiv

#: elements gathered at once, about
_PIECE = 1 << 24


def compress(p: CompressProblem) -> None:
    """Write to `p.entries`, of each sequence at most one entry per `ratio` tokens and one more."""
    num_seqs = len(p.tokens.block_table)
    positions = p.positions.view(num_seqs, -1)
    stored = p.slot_mapping.view(num_seqs, -1) >= 0
    most = cdiv(positions.shape[1], p.ratio)
    device = positions.device
    entries = positions[:, :1] // p.ratio + torch.arange(most, device=device)
    newest = positions.masked_fill(~stored, -1).amax(1, keepdim=True)
    complete = ((entries + 1) * p.ratio <= newest + 1).flatten()
    entries = entries.flatten().where(complete, 0)
    seqs = torch.arange(num_seqs, device=device)[:, None].expand(-1, most).flatten()
    cache, width = p.entries.cache, p.tokens.cache.shape[2]
    for piece in _pieces(len(entries), (1 + p.overlap) * p.ratio * width):
        seq, entry = seqs[piece], entries[piece]
        rows = _entries(p, seq, entry).to(cache.dtype)
        block, place = _place(p.entries, seq, entry)
        keep = complete[piece] & (block > 0)
        # What is not complete writes to the null block what lies there.
        block, place = block.where(keep, 0), place.where(keep, 0)
        cache[block, place] = rows.where(keep[:, None], cache[0, 0])


def _entries(p: CompressProblem, seq: Tensor, entry: Tensor) -> Tensor:
    """Entries `entry [n]` of sequences `seq [n]`: `[n, d]` in the accumulation dtype."""
    ratio, start = p.ratio, entry * p.ratio
    steps = torch.arange(-ratio if p.overlap else 0, ratio, device=entry.device)
    token = start[:, None] + steps
    rows = _rows(p.tokens, seq, token, token >= 0)
    value, score = rows.chunk(2, dim=-1)
    if p.overlap:
        value = torch.cat([value[:, :ratio].chunk(2, -1)[0], value[:, ratio:].chunk(2, -1)[1]], 1)
        score = torch.cat([score[:, :ratio].chunk(2, -1)[0], score[:, ratio:].chunk(2, -1)[1]], 1)
    weight = score.masked_fill(token[..., None] < 0, float("-inf")).softmax(1)
    made = normalise((weight * value).sum(1), p.eps) * p.norm_weight
    return rotate_pairs(made, p.cos_sin[start])


def choose_entries(p: ChooseProblem) -> None:
    """Fill `p.chosen`."""
    topk, most = p.chosen.shape[1], p.keys.num_rows
    every = torch.arange(most, device=p.query.device)
    wide = accumulation_dtype(p.query)
    for piece in _pieces(len(p.query), most * (p.query.shape[2] + p.query.shape[1])):
        seq = _sequences(p.keys, p.positions)[piece]
        visible = every < ((p.positions[piece] + 1) // p.ratio)[:, None]
        keys = _rows(p.keys, seq, every.expand_as(visible), visible)
        products = torch.einsum("thd,ted->the", p.query[piece].to(wide), keys.to(wide)).relu()
        scores = torch.einsum("the,th->te", products, p.head_weights[piece].to(wide))
        scores = scores.masked_fill(~visible, float("-inf"))
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        best = ranked.where(visible.gather(1, ranked), -1)[:, :topk]
        p.chosen[piece] = torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=-1).int()


def compressed_attention(p: CompressedAttentionProblem) -> None:
    """Fill `p.out`."""
    behind = torch.arange(1 - p.window, 1, device=p.query.device)
    wide = accumulation_dtype(p.query)
    most = 0
    if p.entries is not None:
        most = p.entries.num_rows if p.chosen is None else p.chosen.shape[1]
    for piece in _pieces(len(p.query), (p.window + most) * p.query.shape[2]):
        seq = _sequences(p.tokens, p.positions)[piece]
        positions = p.positions[piece, None]
        token = positions + behind
        seen = token >= 0
        rows = _rows(p.tokens, seq, token, seen).to(wide)
        if p.entries is not None:
            if p.chosen is None:
                entry = torch.arange(most, device=seq.device).expand(len(seq), -1)
                visible = entry < (positions + 1) // p.ratio
            else:
                entry = p.chosen[piece].long()
                visible = entry >= 0
            rows = torch.cat([rows, _rows(p.entries, seq, entry, visible).to(wide)], dim=1)
            seen = torch.cat([seen, visible], dim=1)
        scores = torch.einsum("thd,tkd->thk", p.query[piece].to(wide), rows) * p.scale
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        sinks = p.sinks.to(wide)[None, :, None].expand(len(seq), -1, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        p.out[piece] = torch.einsum("thk,tkd->thd", weights, rows).to(p.out.dtype)


def _sequences(rows: PagedRows, positions: Tensor) -> Tensor:
    """The sequence of each token, `[tokens]`."""
    num_seqs = len(rows.block_table)
    seqs = torch.arange(num_seqs, device=positions.device)
    return seqs[:, None].expand(-1, len(positions) // num_seqs).flatten()


def _place(rows: PagedRows, seq: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Block, 0 where there is none, and place of rows `index [n, ...]` of sequences `seq [n]`."""
    size, columns = rows.cache.shape[1], rows.block_table.shape[1]
    column = index // size
    there = (column >= 0) & (column < columns)
    seq = seq.view(-1, *[1] * (index.dim() - 1))
    block = rows.block_table[seq, column.where(there, 0)].where(there, 0)
    return block.clamp(min=0).long(), index % size


def _rows(rows: PagedRows, seq: Tensor, index: Tensor, wanted: Tensor) -> Tensor:
    """Rows `index [n, m]` of sequences `seq [n]`: `[n, m, width]`, 0 where not `wanted`."""
    block, place = _place(rows, seq, index.where(wanted, 0))
    found = rows.cache[block, place]
    return found.masked_fill(~(wanted & (block > 0))[..., None], 0)


def _pieces(count: int, elements: int) -> Iterator[slice]:
    """Slices of `count` things that take `elements` each, at least one at a time."""
    size = max(1, _PIECE // max(elements, 1))
    return (slice(start, start + size) for start in range(0, count, size))
