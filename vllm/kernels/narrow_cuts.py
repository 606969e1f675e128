# SPDX-License-Identifier: Apache-2.0
"""How a matmul of 17 to 256 tokens is cut up: data for `vllm.kernels.narrow`.

By times of weights [2560, 4096] and [2560, 9216] on an H200, under graph replay: each cut, which
adds the residual, against cuBLAS at 17, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224 and 256
tokens. The 132 multiprocessors hold 30 clusters of 4 CTAs or 15 of 8 at once.
"""

from __future__ import annotations

from dataclasses import dataclass

#: columns of the weight are a multiple of one stage of the kernel, rows of one product's step
COLUMN_STEP, ROW_STEP = 64, 8


@dataclass(frozen=True)
class Cut:
    """A compiled variant of `csrc/cuda/hopper/narrow_linear.cu`, and the sizes it is chosen for.

    A CTA multiplies tiles of `tokens` and `rows` of the weight. In a cluster `token_ctas` CTAs have
    different tokens of the same rows, and `split` share out the columns of each tile.
    Chosen for weights of at least `least_columns` whose rows take `clusters`, all there at once.
    """

    tokens: int
    rows: int
    token_ctas: int
    split: int
    least_tokens: int
    least_columns: int
    clusters: int

    @property
    def most_tokens(self) -> int:
        """Tokens of a cluster."""
        return self.tokens * self.token_ctas

    def suits(self, m: int, n: int, k: int) -> bool:
        """Whether `m` tokens times a weight `[n, k]` are faster cut like this than in cuBLAS."""
        return (
            self.least_tokens <= m <= self.most_tokens
            and -(-n // self.rows) == self.clusters
            and k >= self.least_columns
        )


#: in the order of `kCuts`, fewest tokens first
CUTS = (
    Cut(64, 88, token_ctas=1, split=4, least_tokens=17, least_columns=4096, clusters=30),
    Cut(64, 176, token_ctas=2, split=4, least_tokens=65, least_columns=4096, clusters=15),
    Cut(128, 176, token_ctas=2, split=4, least_tokens=192, least_columns=9216, clusters=15),
)


def narrow_cut(m: int, n: int, k: int) -> int | None:
    """The place in `CUTS` of the one that suits `m` tokens and a weight `[n, k]`, or None."""
    if n % ROW_STEP != 0 or k % COLUMN_STEP != 0:
        return None
    return next((i for i, cut in enumerate(CUTS) if cut.suits(m, n, k)), None)
