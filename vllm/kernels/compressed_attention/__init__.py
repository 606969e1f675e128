# SPDX-License-Identifier: Apache-2.0
"""Attention over a window and compressed entries (DeepSeek-V4).

A layer keeps one row per token for its window, and with a compress ratio `r` one *entry* per `r`
tokens: a mean of what its tokens left, weighted channel by channel. Where an entry lies and who
sees it follows from positions alone, so tokens that are computed again write the same places again:
entry `i` is complete with token `(i + 1) * r - 1` and visible from it on.

Sequences of one problem have equally many tokens, so decodes are one problem and each prefill is
one: token `n` belongs to sequence `n // (num_tokens // num_seqs)`. Their positions follow each
other, but for those past the model's length, which are 0 and not stored. Blocks that are not
positive are nobody's: nothing is read from or written to them.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PagedRows:
    """Row `i` of a sequence lies in block `i // rows` of its table, at place `i % rows`.

    `cache [num_blocks, rows, width]`, `block_table [num_seqs, max_blocks]` int32.
    """

    cache: Tensor
    block_table: Tensor

    @property
    def num_rows(self) -> int:
        """Rows of a sequence that the table has blocks for."""
        return self.block_table.shape[1] * self.cache.shape[1]


@dataclass(frozen=True)
class CompressProblem:
    """What `Kernels.compress` computes: the entries that the step's tokens complete.

    `tokens`: fp32 rows `[value | score]` by token, those of this step included. Without `overlap`
    both are `d` wide, and entry `i` is made of tokens `i * ratio` to `(i + 1) * ratio - 1`. With it
    both are `2 d` wide: of the same tokens the second half counts, of the `ratio` tokens before
    them the first half. `entries`: rows `d` wide, by entry.

    An entry is the sum of values under a softmax over tokens of the scores, channel by channel, its
    RMS norm with `norm_weight [d]` and `eps`, its last dimensions rotated in pairs by
    `cos_sin [max_position, rot]` at the position of the window's first token.

    `positions [tokens]` int64, `slot_mapping [tokens]` int64: of the tokens' rows, -1 for padding.
    """

    tokens: PagedRows
    entries: PagedRows
    positions: Tensor
    slot_mapping: Tensor
    ratio: int
    overlap: bool
    norm_weight: Tensor
    eps: float
    cos_sin: Tensor


@dataclass(frozen=True)
class ChooseProblem:
    """What `Kernels.choose_entries` computes: the visible entries of the highest scores.

    `query [tokens, heads, d]`, `head_weights [tokens, heads]`, `keys`: rows `d` wide, by entry. An
    entry's score is the sum over heads of `relu(query . key)` times the head's weight; at equal
    scores the earlier entry is higher. `positions [tokens]` int64.

    `chosen [tokens, topk]` int32 is filled with entries from the highest score down, then -1.
    """

    query: Tensor
    head_weights: Tensor
    keys: PagedRows
    positions: Tensor
    ratio: int
    chosen: Tensor


@dataclass(frozen=True)
class CompressedAttentionProblem:
    """What `Kernels.compressed_attention` computes; the step's rows are already in the caches.

    `query [tokens, heads, d]`. Rows, all `d` wide, are key and value of all heads at once: those of
    the last `window` tokens, and of `entries` (None: there are none) the `chosen [tokens, topk]`
    int32, -1 for none, or without `chosen` all that are visible. A score is a product times
    `scale`; `sinks [heads]` fp32 are scores of what has no value. `positions [tokens]` int64,
    `out [tokens, heads, d]`.
    """

    query: Tensor
    tokens: PagedRows
    window: int
    sinks: Tensor
    scale: float
    positions: Tensor
    out: Tensor
    entries: PagedRows | None = None
    ratio: int = 1
    chosen: Tensor | None = None
