# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections (arXiv 2409.19606): several residual streams, and what a sublayer reads of them
and writes to them. The mixing matrix is made doubly stochastic (arXiv 2512.24880, DeepSeek-V4).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ConnectionProblem:
    """`streams [tokens, n, hidden]`, contiguous. The others are fp32:
    `weight [(2 + n) n, n hidden]` and `base [(2 + n) n]`, the rows of the reading weights first,
    then those of the writing weights, then the mixing matrix row by row; `scale [3]`, one for each
    of these.

    `norm_eps`: of the streams' norm before the product. `eps` is added to reading weights, to the
    elements of the mixing matrix and to the sums that divide it. `iterations`: how often its
    columns are normalised, at least once.
    """

    streams: Tensor
    weight: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    iterations: int


@dataclass(frozen=True)
class Connection:
    """What a sublayer reads, `hidden [tokens, hidden]`, and how the streams go on: `post
    [tokens, n]`, what each gets of the sublayer's result, and `mix [tokens, n, n]`, what the second
    index gets of the first; both fp32."""

    hidden: Tensor
    post: Tensor
    mix: Tensor


@dataclass(frozen=True)
class CollapseProblem:
    """`streams [tokens, n, hidden]`, contiguous; fp32 `weight [n, n hidden]`, `base [n]` and
    `scale [1]`; `norm_eps` and `eps` as in `ConnectionProblem`."""

    streams: Tensor
    weight: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
