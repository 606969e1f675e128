# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in plain torch: what every platform computes.

Nothing here depends on values: the mixing matrix is normalised a fixed number of times.
"""

import torch
from torch import Tensor

from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem
from vllm.kernels.norm.naive import accumulation_dtype, normalise


def connect_streams(problem: ConnectionProblem) -> Connection:
    """What a sublayer reads of the streams, and how they go on: from the product of a token's
    normalised streams with `weight`, times `scale`, plus `base`.

    Reading weights are `sigmoid + eps`, writing weights `2 sigmoid`. The mixing matrix is a softmax
    over its rows, plus `eps`, whose columns are divided by their sums, and then `iterations - 1`
    times its rows and its columns.
    """
    n, eps = problem.streams.shape[1], problem.eps
    sizes = [n, n, n * n]
    product = _product(problem).split(sizes, dim=-1)
    parts = zip(product, problem.scale.unbind(), problem.base.split(sizes), strict=True)
    pre, post, mix = (values * scale + base for values, scale, base in parts)
    mix = mix.unflatten(-1, (n, n)).softmax(-1) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(problem.iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return Connection(_weighted(problem.streams, pre.sigmoid() + eps), 2 * post.sigmoid(), mix)


def collapse_streams(problem: CollapseProblem) -> Tensor:
    """The streams' weighted sum `[tokens, hidden]`, by weights made like reading weights."""
    weights = torch.sigmoid(_product(problem) * problem.scale + problem.base) + problem.eps
    return _weighted(problem.streams, weights)


def join_streams(streams: Tensor, branch: Tensor, connection: Connection) -> Tensor:
    """`post[k] * branch + sum over j of mix[j, k] * streams[j]`, rounded once: `streams
    [tokens, n, hidden]`, contiguous, and `branch [tokens, hidden] -> [tokens, n, hidden]`."""
    wide, dtype = accumulation_dtype(streams), streams.dtype
    added = connection.post.unsqueeze(-1) * branch.to(wide).unsqueeze(1)
    return (added + connection.mix.mT @ streams.to(wide)).to(dtype)


def _product(problem: ConnectionProblem | CollapseProblem) -> Tensor:
    row = normalise(problem.streams.flatten(1), problem.norm_eps)
    return row @ problem.weight.t()


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """The sum over streams, rounded once: `[tokens, hidden]`."""
    return (weights.unsqueeze(-1) * streams.to(weights.dtype)).sum(1).to(streams.dtype)
