# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over the paged cache.

A token's keys and values of all heads are products of one short latent, and only that is kept,
with a few dimensions of key that all heads share. There are two ways to compute the same:

- *expanded*: make keys and values of the context from its latents, then attend as usual. What is
  made serves every query of the step, so it is cheap for many queries;
- *absorbed*: multiply the query by the matrix that makes keys, attend to the latents themselves,
  as if they were the one key and value of all heads, and multiply the result by the matrix that
  makes values. Nothing is made of the context, so it is cheap for few queries.
"""

from dataclasses import dataclass

from torch import Tensor


def expansion_pays(query_len: int, latent: int, nope: int, value: int) -> bool:
    """Whether a sequence's expansion takes fewer products than it saves, whatever its context.

    Of each head and token of context it takes `latent * (nope + value)`; a query then needs
    `nope + value` (and the shared dimensions) instead of twice the latent.
    """
    return query_len * (2 * latent - nope - value) > latent * (nope + value)


@dataclass(frozen=True)
class LatentAttentionProblem:
    """What `Kernels.latent_attention` computes; the step's rows are already in the cache.

    `query [tokens, heads, nope + shared]`, `kv_b [heads, nope + value, latent]`: what makes keys,
    then values, of a latent; `cache [num_blocks, block_size, latent + shared]`: rows of a latent
    and the key dimensions that all heads share. Key of head `h` is `[kv_b[h, :nope] @ latent |
    shared]`, value `kv_b[h, nope:] @ latent`; scores are products of query and key times `scale`.
    `out [tokens, heads, value]`.

    `block_table [num_seqs, max_blocks]`, `seq_lens [num_seqs]`, `query_start_loc [num_seqs + 1]`,
    all int32, `max_query_len`, `max_seq_len` and causality as in `AttentionProblem`. `room`: most
    context tokens times heads whose keys and values may exist at once.
    """

    query: Tensor
    kv_b: Tensor
    cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    out: Tensor
    room: int

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
    def block_size(self) -> int:
        return self.cache.shape[1]

    @property
    def latent(self) -> int:
        return self.kv_b.shape[2]

    @property
    def shared(self) -> int:
        return self.cache.shape[2] - self.latent

    @property
    def nope(self) -> int:
        """Dimensions of a query that meet what a head makes of the latent."""
        return self.query.shape[2] - self.shared

    @property
    def value(self) -> int:
        return self.out.shape[2]

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == 0 or self.num_seqs == 0
