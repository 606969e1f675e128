# SPDX-License-Identifier: Apache-2.0
"""Items of the checklist that only replays tell: before, where the line that reads or writes has
the number, and after. They are shown in docs/graph-safety.md, and run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

HIDDEN, TOKENS = 4, 3


@dataclass
class Lengths:
    """Metadata of a kind of layer."""

    tokens: Tensor


class Layer(nn.Module):
    """`prepare` runs before each step. `state`: what padding may not write; `metadata`: of the
    step's context."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] = {}
        self.metadata: Lengths | None = None

    def prepare(self, step: int) -> None:
        pass


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(HIDDEN)


class FreedBefore(Scaled):
    def prepare(self, step: int) -> None:
        self.scale = torch.full((HIDDEN,), float(step))  # frees what the graph reads

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * self.scale  # 15


class FreedAfter(Scaled):
    def prepare(self, step: int) -> None:
        self.scale.fill_(float(step))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * self.scale


class NarrowBefore(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(TOKENS, HIDDEN // 2)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return torch.mul(x, 2, out=self.out)  # 16


class NarrowAfter(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(TOKENS, HIDDEN)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        assert self.out.shape == x.shape, "where it is made is better still"
        return torch.mul(x, 2, out=self.out)


class Routed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.expert_of = torch.arange(16) % 3
        self.ids: Tensor | None = None


class RouteBefore(Routed):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if self.ids is None:
            self.ids = position.clone()  # 20
        return x * self.expert_of[self.ids].unsqueeze(1)


class RouteAfter(Routed):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * self.expert_of[position].unsqueeze(1)  # the step's own tensor


class Cached(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(4, 16, 1, HIDDEN)
        self.state = {"the cache": self.cache}


class PaddingBefore(Cached):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        slots = position.clamp(min=0)
        current_platform.kernels.write_rows(x.unsqueeze(1), self.cache, slots)  # 21
        return x + 1


class PaddingAfter(Cached):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        # A row of padding has slot -1.
        current_platform.kernels.write_rows(x.unsqueeze(1), self.cache, position)
        return x + 1


class Measured(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.metadata = Lengths(torch.zeros(TOKENS))


class MetadataBefore(Measured):
    def prepare(self, step: int) -> None:
        self.metadata = Lengths(torch.full((TOKENS,), float(step)))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        metadata = get_forward_context().attn_metadata["layer"]
        return x * metadata.tokens.unsqueeze(1)  # 22


class MetadataAfter(Measured):
    def prepare(self, step: int) -> None:
        assert self.metadata is not None
        self.metadata.tokens.fill_(float(step))  # an array: staged and copied from pinned memory

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        metadata = get_forward_context().attn_metadata["layer"]
        return x * metadata.tokens.unsqueeze(1)


class RangeBefore(Layer):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        weights = x.exp()  # 28
        return weights / weights.sum(-1, keepdim=True)


class RangeAfter(Layer):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        weights = (x - x.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)
