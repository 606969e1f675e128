# SPDX-License-Identifier: Apache-2.0
"""Each item of the checklist that source tells: before, on a line with its number, and after. They
are read by the pass and shown in docs/graph-safety.md, never run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from vllm import platforms
from vllm.compilation.graph_break import graph_break
from vllm.platforms import _current

HIDDEN, TOKENS = 4, 8


@triton.jit
def _double(x_ptr, tokens, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    pass


class ReadBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        peak = x.abs().max().item()  # 1
        return x / peak


class ReadAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(8, dtype=torch.int64)
        self.ones = torch.ones(TOKENS, dtype=torch.int64)


class CountBefore(nn.Module):
    def forward(self, chosen: Tensor) -> Tensor:
        return torch.bincount(chosen)  # 2


class CountAfter(Counts):
    def forward(self, chosen: Tensor) -> Tensor:
        self.counts.zero_()
        return self.counts.scatter_add_(0, chosen, self.ones[: len(chosen)])


class ExpertsBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for expert in chosen:  # 3
            x = self.experts[expert](x)
        return x


class ExpertsAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        # [tokens, hidden, hidden], or a kernel that reads `chosen`: `kernels.moe`
        weights = self.weights[chosen]
        return torch.bmm(weights, x.unsqueeze(-1)).squeeze(-1)


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.arange(5)
        self.offsets = torch.zeros(5, dtype=torch.int64)


class OffsetsBefore(Offsets):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            self.offsets[i + 1] = (i + 1) * len(x)  # 4
        return self.offsets


class OffsetsAfter(Offsets):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(self.places, len(x), out=self.offsets)


class BranchBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1:  # 5
            x = x / 2
        return x


class BranchAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().amax() > 1, x / 2, x)


class BreakBefore(nn.Module):
    @graph_break
    def attend(self, query: Tensor, out: Tensor) -> None:
        scores = torch.empty_like(query)  # 6
        torch.mul(query, query, out=scores)
        torch.softmax(scores, -1, out=out)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.attend(x, out)
        return out


class BreakAfter(nn.Module):
    @graph_break
    def attend(self, query: Tensor, scores: Tensor, out: Tensor) -> None:
        torch.mul(query, query, out=scores)
        torch.softmax(scores, -1, out=out)

    def forward(self, x: Tensor) -> Tensor:
        scores, out = torch.empty_like(x), torch.empty_like(x)
        self.attend(x, scores, out)
        return out


class InputsBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_ids = [3, 1]

    def forward(self, table: Tensor) -> Tensor:
        ids = torch.tensor(self.token_ids, device=table.device)  # 7
        return table[ids]


class InputsAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.zeros(TOKENS, dtype=torch.int64)
        self.pinned = [torch.zeros(TOKENS, dtype=torch.int64) for _ in range(2)]

    def prepare(self, token_ids: list[int], step: int) -> None:
        pinned = self.pinned[step % 2]  # the other one may still be on its way
        pinned.numpy()[: len(token_ids)] = token_ids
        self.ids.copy_(pinned, non_blocking=True)

    def forward(self, table: Tensor) -> Tensor:
        return table[self.ids]


class EmitBefore(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor] | None:
        if (position + 1) % 4 != 0:  # 8
            return None
        return x, position // 4


class EmitAfter(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor] | None:
        emits = (position + 1) % 4 == 0
        return x, torch.where(emits, position // 4, -1)  # kernels skip slot -1


class CacheBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(0, HIDDEN)

    def forward(self, key: Tensor, slots: Tensor, length: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, key])  # 9
        return self.keys.sum(0)


class CacheAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(64, HIDDEN)
        self.places = torch.arange(64)

    def forward(self, key: Tensor, slots: Tensor, length: Tensor) -> Tensor:
        self.keys.index_copy_(0, slots, key)
        held = self.places < length
        return torch.where(held[:, None], self.keys, 0.0).sum(0)


class GatherBefore(nn.Module):
    def forward(self, scores: Tensor, count: Tensor) -> Tensor:
        return scores[: count[0]].softmax(0)  # 10


class GatherAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.arange(64)

    def forward(self, scores: Tensor, count: Tensor) -> Tensor:
        absent = self.places[: len(scores)] >= count
        return scores.masked_fill(absent, float("-inf")).softmax(0)


class NormaliseBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while (x.sum(0) - 1).abs().max() > 1e-6:  # 11
            x = x / x.sum(1, keepdim=True)
            x = x / x.sum(0)
        return x


class NormaliseAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x / x.sum(1, keepdim=True)
            x = x / x.sum(0)
        return x


class SampleBefore(nn.Module):
    def forward(self, logits: Tensor, table: Tensor) -> Tensor:
        token = logits.argmax(-1)
        return table[token.item()]  # 12


class SampleAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.zeros(TOKENS, dtype=torch.int64)

    def forward(self, logits: Tensor, table: Tensor) -> Tensor:
        ids = self.ids[: len(logits)]
        ids.copy_(logits.argmax(-1))  # the host gets a copy beside the step
        return table[ids]


class CaptureBefore(nn.Module):
    def forward(self, x: Tensor, graph: torch.cuda.CUDAGraph) -> Tensor:
        with torch.cuda.graph(graph):  # 13
            return x * 2


class CaptureAfter(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.stream = torch.cuda.Stream(device)

    def forward(self, x: Tensor, graph: torch.cuda.CUDAGraph) -> Tensor:
        # Made with torch.cuda.Stream(device); replays run on it as well.
        with torch.cuda.graph(graph, stream=self.stream):
            return x * 2


class OrderBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()  # 14
        return x + 1


class OrderAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.written = torch.cuda.Event()  # who writes `x` records it on its stream

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_event(self.written)
        return x + 1


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(HIDDEN))


class ScalesBefore(Scales):
    def forward(self, x: Tensor) -> Tensor:
        self.scales = x.abs().amax(0)  # 17
        return x / self.scales


class ScalesAfter(Scales):
    def forward(self, x: Tensor) -> Tensor:
        torch.amax(x.abs(), 0, out=self.scales)
        return x / self.scales


class BroadcastBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        _double[(1,)](self.weight.expand(TOKENS), TOKENS, TOKENS=0, BLOCK=16)  # 18
        return x


class BroadcastAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.rows = self.weight.expand(TOKENS).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        _double[(1,)](self.rows, TOKENS, TOKENS=0, BLOCK=16)
        return x


class RouterBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8, HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.gate.float().t()  # 19


class RouterAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8, HIDDEN, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.gate.t()


class PlanBefore(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library, self.lengths = library, [3, 1]

    def forward(self, x: Tensor) -> Tensor:
        self.library.plan(self.lengths)  # 23
        return self.library.run(x)


class PlanAfter(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library

    def prepare(self, lengths: list[int]) -> None:
        self.library.plan(lengths)  # before the replay

    def forward(self, x: Tensor) -> Tensor:
        return self.library.run(x)


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = torch.cuda.Stream()


class SideBefore(Sides):
    def forward(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(self.side):  # 24
            y = x * 2
        return x + y


class SideAfter(Sides):
    def forward(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(self.side)
        return x + y


class LaunchBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _double[(1,)](x, 0, TOKENS=x.shape[0], BLOCK=16)  # 25
        return x


class LaunchAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _double[(1,)](x, x.shape[0], TOKENS=0, BLOCK=16)
        return x


class HandOnBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x  # 26
        return x + 1


class HandOnAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(TOKENS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        self.last[: len(x)].copy_(x)
        return x + 1


class ImportBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if _current is None else x  # 27


class ImportAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if platforms._current is None else x
