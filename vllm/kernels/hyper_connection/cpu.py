# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections on the CPU: the reference around a product whose rows do not depend on how many
there are."""

from torch import Tensor

from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem
from vllm.kernels.hyper_connection.naive import collapse, connect, join_streams, normalised
from vllm.kernels.linear.cpu import skinny_linear

__all__ = ["collapse_streams", "connect_streams", "join_streams"]


def connect_streams(problem: ConnectionProblem) -> Connection:
    """See `naive.connect_streams`."""
    return connect(problem, skinny_linear(normalised(problem), problem.weight, None))


def collapse_streams(problem: CollapseProblem) -> Tensor:
    """See `naive.collapse_streams`."""
    return collapse(problem, skinny_linear(normalised(problem), problem.weight, None))
