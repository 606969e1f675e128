# SPDX-License-Identifier: Apache-2.0
"""What a forward pass may do: the pass finds nothing here."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.forward_context import get_forward_context


class Rows:
    """A step makes its own."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, rows: int) -> None:
        self.count += rows


class Mixer(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden, hidden)
        self.width = width
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(2)])
        self.register_buffer("counts", torch.zeros(8, dtype=torch.int64))
        self.num_attended = 0
        self.register_buffer("ones", torch.ones(8, dtype=torch.int64))

    def forward(self, x: Tensor, positions: Tensor, chosen: Tensor, sizes: np.ndarray) -> Tensor:
        tokens, hidden = x.shape
        if tokens == 0 or sizes.max() > 4 or x.dtype == torch.float32:
            return torch.empty_like(x)
        total = int(sizes.sum())
        for layer in self.layers:
            x = layer(x)
        done = (positions + 1) % self.width == 0
        x = torch.where(done[:, None], x, x.new_zeros(()))
        self.counts.zero_()
        self.counts.scatter_add_(0, chosen, self.ones)
        self.counts += self.ones
        self.counts[0] += 1
        self.width = 4
        rows, parts = Rows(), {"x": 0}
        rows.take(tokens)
        rows.count += 1
        parts["x"] += rows.count
        x = x.masked_fill(done[:, None], 0.0)[:total]
        x[:, :2] = 0.0
        first, *others = x.chunk(2)
        assert first is not None and len(others) == 1, f"{first.shape}"
        out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
        self.attend(x, out)
        return out if get_forward_context().only_decodes else out + x

    @graph_break
    def attend(self, x: Tensor, out: Tensor) -> None:
        self.num_attended += 1
        torch.add(x, x, out=out)
