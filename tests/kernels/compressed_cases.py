# SPDX-License-Identifier: Apache-2.0
"""Problems of compressed attention on poisoned caches, and each op token by token in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.cases import arena_cache, randn, strided, widen
from vllm.kernels.compressed_attention import (
    ChooseProblem,
    CompressedAttentionProblem,
    CompressProblem,
    PagedRows,
)

MAX_POSITION = 600
#: of a kernel's results against fp64: products over a few hundred rows, in fp32
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def widened(value: Any) -> Any:
    """A copy of a problem whose floating tensors are fp64."""
    if not is_dataclass(value):
        return widen(value)
    changes = {field.name: widened(getattr(value, field.name)) for field in fields(value)}
    return replace(value, **changes)  # type: ignore[type-var]


def paged(
    rows: Sequence[Tensor | None], size: int, spare: int, kept: int | None = None
) -> PagedRows:
    """`rows[seq] [n, width]` (None: a sequence of padding) in blocks of `size` rows, in any order,
    and room for `spare` more. Only the last `kept` rows are there; before them lies the null
    block where a block has none of them, else NaN."""
    width, dtype, device = next((r.shape[1], r.dtype, r.device.type) for r in rows if r is not None)
    counts = [0 if r is None else -(-(len(r) + spare) // size) for r in rows]
    cache = arena_cache(sum(counts) + 3, size, width, dtype=dtype, device=device)
    order = (1 + torch.randperm(sum(counts) + 2)).tolist()
    table = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    for seq, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if row is None:
            table[seq] = -1
            continue
        first = 0 if kept is None else max(0, len(row) - kept)
        for i in range(first // size, count):
            block = table[seq, i] = order.pop()
            for place in range(size):
                if first <= i * size + place < len(row):
                    cache[block, place] = row[i * size + place]
    return PagedRows(cache, table.to(device))


def read(rows: PagedRows, seq: int, index: int) -> Tensor:
    size = rows.cache.shape[1]
    return rows.cache[int(rows.block_table[seq, index // size]), index % size]


def _positions(starts: Sequence[int], query_len: int, device: str) -> Tensor:
    """Of padding, whose start is negative, zeros."""
    rows = [range(s, s + query_len) if s >= 0 else [0] * query_len for s in starts]
    return torch.tensor([list(row) for row in rows], device=device).flatten()


def compress_problem(
    starts: Sequence[int],
    query_len: int,
    ratio: int,
    overlap: bool,
    *,
    width: int = 12,
    rot: int = 4,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> CompressProblem:
    """Sequences that have `starts` tokens, negative: padding, and `query_len` new ones."""
    columns = 2 * width * (1 + overlap)
    ends = [s + query_len if s >= 0 else None for s in starts]
    rows = [
        None if end is None else randn(end, columns, dtype=torch.float32, device=device)
        for end in ends
    ]
    positions = _positions(starts, query_len, device)
    padding = torch.tensor([s < 0 for s in starts], device=device).repeat_interleave(query_len)
    blank = torch.zeros(0, width, dtype=dtype, device=device)
    room = -(-(max(end or 0 for end in ends)) // ratio) + 1
    size = math.lcm(block_size, ratio) // ratio
    entries = paged([None if end is None else blank for end in ends], size, room)
    kept = query_len + (1 + overlap) * ratio - 1
    return CompressProblem(
        tokens=paged(rows, block_size, 0, kept),
        entries=entries,
        positions=positions,
        slot_mapping=torch.where(padding, -1, positions),
        ratio=ratio,
        overlap=overlap,
        norm_weight=1 + randn(width, dtype=dtype, device=device, scale=0.3),
        eps=1e-6,
        cos_sin=_angles(rot, device),
    )


def _angles(rot: int, device: str) -> Tensor:
    angles = torch.outer(torch.arange(MAX_POSITION), 0.5 ** torch.arange(rot // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def choose_problem(
    starts: Sequence[int],
    query_len: int,
    topk: int,
    *,
    ratio: int = 4,
    heads: int = 16,
    width: int = 12,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ChooseProblem:
    tokens = len(starts) * query_len
    keys = [
        None if s < 0 else randn((s + query_len) // ratio, width, dtype=dtype, device=device)
        for s in starts
    ]
    return ChooseProblem(
        query=strided(randn(tokens, heads, width, dtype=dtype, device=device)),
        head_weights=randn(tokens, heads, dtype=torch.float32, device=device),
        keys=paged(keys, block_size // ratio, 1),
        positions=_positions(starts, query_len, device),
        ratio=ratio,
        chosen=torch.full((tokens, topk), -7, dtype=torch.int32, device=device),
    )


def attention_problem(
    starts: Sequence[int],
    query_len: int,
    ratio: int,
    topk: int | None = None,
    *,
    window: int = 10,
    heads: int = 3,
    width: int = 12,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> CompressedAttentionProblem:
    """Without a ratio a window alone; `topk`: entries that are chosen, None: all are seen."""
    tokens = len(starts) * query_len
    ends = [None if s < 0 else s + query_len for s in starts]

    def drawn(count: int | None) -> Tensor | None:
        return None if count is None else randn(count, width, dtype=dtype, device=device)

    kept = paged([drawn(end) for end in ends], block_size, 0, window + query_len - 1)
    positions = _positions(starts, query_len, device)
    entries = chosen = None
    if ratio:
        size = math.lcm(block_size, ratio) // ratio
        entries = paged([drawn(None if end is None else end // ratio) for end in ends], size, 1)
    if topk is not None:
        chosen = torch.full((tokens, topk), -1, dtype=torch.int32)
        for token, position in enumerate(positions.tolist()):
            some = torch.randperm((position + 1) // ratio)[:topk]
            if starts[token // query_len] >= 0:
                chosen[token, : len(some)] = some
        chosen = chosen.to(device)
    query = strided(randn(tokens, heads, width, dtype=dtype, device=device))
    return CompressedAttentionProblem(
        query=query,
        tokens=kept,
        window=window,
        sinks=randn(heads, dtype=torch.float32, device=device),
        scale=width**-0.5,
        positions=positions,
        out=torch.full_like(query, torch.nan),
        entries=entries,
        ratio=max(ratio, 1),
        chosen=chosen,
    )


# ---- the ops by their equations, for sequences without padding ----------------------------------


def compressed_by_definition(p: CompressProblem) -> dict[tuple[int, int], Tensor]:
    """By sequence and number the entries that the step completes, channel by channel."""
    num_seqs = len(p.tokens.block_table)
    made: dict[tuple[int, int], Tensor] = {}
    for seq, positions in enumerate(p.positions.view(num_seqs, -1).tolist()):
        for t in positions:
            if (t + 1) % p.ratio:
                continue
            first = t + 1 - p.ratio
            width = p.entries.cache.shape[2]
            entry = torch.zeros(width, dtype=torch.float64)
            for channel in range(width):
                pairs = []
                for token in range(max(0, first - p.ratio) if p.overlap else first, t + 1):
                    at = channel + (width if p.overlap and token >= first else 0)
                    row = read(p.tokens, seq, token).double()
                    pairs.append((float(row[at]), float(row[len(row) // 2 + at])))
                total = sum(math.exp(score) for _, score in pairs)
                entry[channel] = sum(v * math.exp(score) / total for v, score in pairs)
            entry = entry / (entry.square().mean() + p.eps).sqrt() * p.norm_weight.double()
            turned, rot = entry.clone(), p.cos_sin.shape[1]
            for pair in range(rot // 2):
                cos, sin = p.cos_sin[first, [pair, rot // 2 + pair]].double()
                i = width - rot + 2 * pair
                turned[i] = entry[i] * cos - entry[i + 1] * sin
                turned[i + 1] = entry[i] * sin + entry[i + 1] * cos
            made[seq, first // p.ratio] = turned
    return made


def chosen_by_definition(p: ChooseProblem) -> list[list[int]]:
    """Of every token the entries, best first."""
    query_len = len(p.positions) // len(p.keys.block_table)
    result = []
    for token, position in enumerate(p.positions.tolist()):
        scores = {}
        for entry in range((position + 1) // p.ratio):
            key = read(p.keys, token // query_len, entry).double()
            products = (p.query[token].double() @ key).clamp(min=0)
            scores[entry] = float((products * p.head_weights[token].double()).sum())
        best = sorted(scores, key=lambda entry: (-scores[entry], entry))
        result.append(best[: p.chosen.shape[1]])
    return result


def attended_by_definition(p: CompressedAttentionProblem) -> Tensor:
    """`[tokens, heads, d]` fp64."""
    query_len = len(p.positions) // len(p.tokens.block_table)
    out = torch.zeros(p.out.shape, dtype=torch.float64)
    for token, position in enumerate(p.positions.tolist()):
        seq = token // query_len
        first = max(0, position + 1 - p.window)
        seen = [read(p.tokens, seq, j) for j in range(first, position + 1)]
        if p.entries is not None:
            numbers = list(range((position + 1) // p.ratio))
            if p.chosen is not None:
                numbers = [i for i in p.chosen[token].tolist() if i >= 0]
            seen += [read(p.entries, seq, i) for i in numbers]
        rows = torch.stack(seen).double()
        for head in range(len(p.sinks)):
            weights = (rows @ p.query[token, head].double() * p.scale).exp()
            total = weights.sum() + p.sinks[head].double().exp()
            out[token, head] = weights @ rows / total
    return out
