# SPDX-License-Identifier: Apache-2.0
"""Narrowing a distribution: top-k, top-p (nucleus, arXiv 1904.09751), min-p (arXiv 2407.01082)."""

from __future__ import annotations

from torch import Tensor


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than `min_p [n]` times the most likely one; `logits [n, vocab]`."""
    probs = logits.softmax(dim=-1)
    threshold = probs.amax(dim=-1, keepdim=True) * min_p.unsqueeze(1)
    return logits.masked_fill(probs < threshold, float("-inf"))


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
