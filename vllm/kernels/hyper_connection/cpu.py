# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections on the CPU: `csrc/cpu/kernels/hyper_connection.cpp`."""

from torch import Tensor

from vllm._extension import cpu_ops
from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem

_ops = cpu_ops()
_connect = _ops.connect_streams.default
_collapse = _ops.collapse_streams.default
_join = _ops.join_streams.default


def connect_streams(problem: ConnectionProblem) -> Connection:
    """See `naive.connect_streams`."""
    p = problem
    return Connection(
        *_connect(p.streams, p.weight, p.base, p.scale, p.norm_eps, p.eps, p.iterations)
    )


def collapse_streams(problem: CollapseProblem) -> Tensor:
    """See `naive.collapse_streams`."""
    p = problem
    out: Tensor = _collapse(p.streams, p.weight, p.base, p.scale, p.norm_eps, p.eps)
    return out


def join_streams(streams: Tensor, branch: Tensor, connection: Connection) -> Tensor:
    """See `naive.join_streams`."""
    out: Tensor = _join(streams, branch, connection.post, connection.mix)
    return out
