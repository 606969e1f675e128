# SPDX-License-Identifier: Apache-2.0
"""Tiles of a matmul of many tokens, and where they beat cuBLAS: data for `vllm.kernels.wide`.

By times on an H200, whose 132 multiprocessors make a tile each at once, of a graph's matmul and the
norm before it, or after it where that adds the residual, as `benchmarks/wide.py` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

#: about as many tokens keep their place in the L2 cache while the weight passes by
CACHED_TOKENS = 2048


@dataclass(frozen=True)
class Tile:
    """A compiled shape of `csrc/cuda/hopper/wide_linear.cu`.

    A multiprocessor makes `tokens` by `outputs` of the result; clusters of multiprocessors make
    `rows` by `columns` of these and fetch once what both need.
    """

    tokens: int
    outputs: int
    rows: int = 1
    columns: int = 1

    @property
    def group(self) -> int:
        """Rows of clusters that go through all columns together."""
        return max(1, CACHED_TOKENS // (self.tokens * self.rows))


#: in the order in which `wide_linear.cu` lists them
TILES = (
    Tile(128, 256, rows=2),
    Tile(128, 160, rows=2),
    Tile(128, 256, columns=2),
    Tile(128, 96),
)


@dataclass(frozen=True)
class Span:
    """Numbers of tokens, both ends included, and the place of their tile in `TILES`."""

    least: int
    most: int
    tile: int


#: by [n, k] of the weight; what is in no span is faster in cuBLAS or has not been measured
SPANS: dict[tuple[int, int], tuple[Span, ...]] = {
    (12352, 2560): (Span(64, 128, 3),),
    (10240, 2560): (Span(224, 256, 1), Span(320, 384, 2), Span(768, 832, 1)),
    (2560, 4096): (Span(7937, 8192, 0),),
}


def wide_tile(m: int, n: int, k: int) -> int | None:
    """The place in `TILES` of the tile for `m` tokens and a weight `[n, k]`, or None for cuBLAS."""
    spans = SPANS.get((n, k), ())
    return next((span.tile for span in spans if span.least <= m <= span.most), None)
