# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections where there is no kernel of them: the reference, op by op."""

from torch import Tensor

from vllm import decisions
from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem, naive


def connect_streams(problem: ConnectionProblem) -> Connection:
    """See `naive.connect_streams`."""
    decisions.record(
        "hyper-connections",
        "reference in torch",
        "there is no GPU kernel of them yet; each takes some hundred small launches",
    )
    return naive.connect_streams(problem)


def collapse_streams(problem: CollapseProblem) -> Tensor:
    """See `naive.collapse_streams`."""
    return naive.collapse_streams(problem)


def join_streams(streams: Tensor, branch: Tensor, connection: Connection) -> Tensor:
    """See `naive.join_streams`."""
    return naive.join_streams(streams, branch, connection)
