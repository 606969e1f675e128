# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in place of residual additions (DeepSeek-V4).

Between layers a token has several residual streams, `[tokens, n, hidden]`. A sublayer reads a
weighted sum of them; its result is added to all of them, after these have been mixed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.kernels.hyper_connection import CollapseProblem, Connection, ConnectionProblem
from vllm.model_executor.parameter import default_weight_loader, empty_parameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform


@dataclass(frozen=True)
class HyperConnectionShape:
    """`num_streams` of `hidden_size`. `norm_eps`, `eps` and `iterations`: see
    `ConnectionProblem`."""

    hidden_size: int
    num_streams: int
    norm_eps: float
    eps: float
    iterations: int

    @property
    def row_size(self) -> int:
        """All streams of a token."""
        return self.num_streams * self.hidden_size


def _parameter(*shape: int, low: float, high: float) -> nn.Parameter:
    """fp32 whatever the model, whole on every rank."""
    param = empty_parameter(*shape, dtype=torch.float32)
    attrs = {"weight_loader": default_weight_loader, "dummy_range": (low, high)}
    set_weight_attrs(param, attrs)
    return param


class _Weights(nn.Module):
    """`fn [outputs, n hidden]`, `base [outputs]`, `scale [scales]`, as checkpoints call them."""

    def __init__(self, shape: HyperConnectionShape, outputs: int, scales: int) -> None:
        super().__init__()
        self.shape = shape
        bound = (3 / shape.row_size) ** 0.5
        self.fn = _parameter(outputs, shape.row_size, low=-bound, high=bound)
        self.base = _parameter(outputs, low=-1.0, high=1.0)
        self.scale = _parameter(scales, low=0.5, high=1.5)

    def extra_repr(self) -> str:
        return f"{self.shape.num_streams} streams of {self.shape.hidden_size}"


class HyperConnection(_Weights):
    """What one sublayer reads of the streams and writes to them."""

    def __init__(self, shape: HyperConnectionShape) -> None:
        super().__init__(shape, (2 + shape.num_streams) * shape.num_streams, 3)

    def enter(self, streams: Tensor) -> Connection:
        """`streams [tokens, n, hidden]`, contiguous."""
        shape = self.shape
        return current_platform.kernels.connect_streams(
            ConnectionProblem(
                streams,
                self.fn,
                self.base,
                self.scale,
                shape.norm_eps,
                shape.eps,
                shape.iterations,
            )
        )

    @staticmethod
    def leave(streams: Tensor, branch: Tensor, connection: Connection) -> Tensor:
        """The streams `[tokens, n, hidden]` after the sublayer gave `branch [tokens, hidden]`."""
        return current_platform.kernels.join_streams(streams, branch, connection)


class StreamCollapse(_Weights):
    """One hidden state of all streams, after the last layer."""

    def __init__(self, shape: HyperConnectionShape) -> None:
        super().__init__(shape, shape.num_streams, 1)

    def forward(self, streams: Tensor) -> Tensor:
        """`[tokens, n, hidden] -> [tokens, hidden]`."""
        shape = self.shape
        problem = CollapseProblem(
            streams, self.fn, self.base, self.scale, shape.norm_eps, shape.eps
        )
        return current_platform.kernels.collapse_streams(problem)
