# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in plain torch: what every platform computes.

Nothing here depends on values: the mixing matrix is normalised a fixed number of times. Sums over
streams are written out, in their order, so that a token's bits do not depend on the other tokens.
"""

import torch
from torch import Tensor

from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem
from vllm.kernels.norm.naive import accumulation_dtype, normalise


def connect_streams(problem: ConnectionProblem) -> Connection:
    """What a sublayer reads of the streams, and how they go on, from the product of the normalised
    streams of a token with `weight`.

    Reading weights are `sigmoid + eps`, writing weights `2 sigmoid`. The mixing matrix is a softmax
    over its rows, plus `eps`, whose columns are divided by their sums, and then `iterations - 1`
    times its rows and its columns.
    """
    return connect(problem, normalised(problem) @ problem.weight.t())


def collapse_streams(problem: CollapseProblem) -> Tensor:
    """The streams' weighted sum `[tokens, hidden]`, by weights `sigmoid + eps`."""
    return collapse(problem, normalised(problem) @ problem.weight.t())


def join_streams(streams: Tensor, branch: Tensor, connection: Connection) -> Tensor:
    """`post[k] * branch + sum over j of mix[j, k] * streams[j]`, rounded once: `streams
    [tokens, n, hidden]`, `branch [tokens, hidden] -> [tokens, n, hidden]`."""
    dtype = accumulation_dtype(streams)
    total = connection.post.unsqueeze(-1) * branch.to(dtype).unsqueeze(1)
    for stream, shares in zip(streams.unbind(1), connection.mix.unbind(1), strict=True):
        total = total + shares.unsqueeze(-1) * stream.to(dtype).unsqueeze(1)
    return total.to(streams.dtype)


def normalised(problem: ConnectionProblem | CollapseProblem) -> Tensor:
    """All streams of a token as one row, `[tokens, n hidden]` in the accumulation dtype."""
    return normalise(problem.streams.flatten(1), problem.norm_eps)


def connect(problem: ConnectionProblem, product: Tensor) -> Connection:
    """`connect_streams` from its product `[tokens, (2 + n) n]`."""
    n, eps = problem.streams.shape[1], problem.eps
    parts = zip(
        product.split([n, n, n * n], dim=-1),
        problem.base.split([n, n, n * n]),
        problem.scale.unbind(),
        strict=True,
    )
    pre, post, mix = (values * scale + base for values, base, scale in parts)
    mix = mix.unflatten(-1, (n, n)).softmax(-1) + eps
    mix = mix / (_sum(mix, 1) + eps)
    for _ in range(problem.iterations - 1):
        mix = mix / (_sum(mix, 2) + eps)
        mix = mix / (_sum(mix, 1) + eps)
    hidden = _weighted(problem.streams, pre.sigmoid() + eps)
    return Connection(hidden, 2 * post.sigmoid(), mix)


def collapse(problem: CollapseProblem, product: Tensor) -> Tensor:
    """`collapse_streams` from its product `[tokens, n]`."""
    weights = torch.sigmoid(product * problem.scale + problem.base) + problem.eps
    return _weighted(problem.streams, weights)


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """The sum over streams, rounded once: `[tokens, hidden]`."""
    wide = streams.to(weights.dtype)
    return _sum(weights.unsqueeze(-1) * wide, 1).squeeze(1).to(streams.dtype)


def _sum(values: Tensor, dim: int) -> Tensor:
    """Over `dim`, which stays with size 1, from its first element to its last."""
    total, *others = values.split(1, dim)
    for other in others:
        total = total + other
    return total
