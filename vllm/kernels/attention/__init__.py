# SPDX-License-Identifier: Apache-2.0
"""Attention of a ragged batch over the paged cache."""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

#: query rows of a kv head up to which a sequence is a decode's, and shares keys among programs
SHORT_ROWS = 64


class QueryRows(IntEnum):
    """What the query rows of a sequence are to each other; C++ knows the numbers.

    Of a block, which a drafter fills at once, every row has the window of the first one. In a
    whole block each sees all the others, in a causal block those before it.
    """

    TOKENS = 0
    CAUSAL_BLOCK = 1
    WHOLE_BLOCK = 2


@dataclass(frozen=True)
class AttentionProblem:
    """What `Kernels.paged_attention` computes; keys and values of the step are already written.

    `query [tokens, num_heads, head_dim]`, `kv_cache [num_blocks, 2, block_size, num_kv_heads,
    head_dim]`, `block_table [num_seqs, max_blocks]` int32, `seq_lens [num_seqs]` int32 (context
    including this step's tokens), `query_start_loc [num_seqs + 1]` int32, `out` like `query`.
    Query row `i` of a sequence has position `seq_len - query_len + i` and sees positions `<=` its
    own and, with `sliding_window`, `> position - sliding_window`; `rows` may change both. Query
    head `h` reads kv head `h // (num_heads // num_kv_heads)`. Sequences of `seq_len 0` are padding.
    No query is longer than `max_query_len` and no context than `max_seq_len`: grids follow from
    these.
    Keys and values of a float8 cache are multiplied by `k_scale` and `v_scale`. With `gate`,
    like `query` with any token and head stride, the result is `mul_sigmoid(out, gate)`. With
    `sinks [num_heads]` fp32 each row's softmax has one more score, whose value is zero (arXiv
    2309.17453; learned, as in gpt-oss).
    """

    query: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    sliding_window: int | None
    out: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    gate: Tensor | None = None
    rows: QueryRows = QueryRows.TOKENS
    sinks: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.query)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[3]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == 0 or self.num_seqs == 0
