# SPDX-License-Identifier: Apache-2.0
"""Hazards, each on a line that names its number in the checklist. Read by the pass, never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from vllm.compilation.graph_break import graph_break
from vllm.platforms import _current


@triton.jit
def _kernel(x_ptr, n, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    pass


@triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=["n"])
@triton.jit
def _tuned(x_ptr, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def _first(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def _early(x_ptr, weight_ptr, y_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at)
    x = tl.load(x_ptr + at)
    if n == 0:
        return  # 24
    if n == 1:
        tl.atomic_add(y_ptr + at, weight)  # 24
    if PDL:
        tl.extra.cuda.gdc_wait()
    tl.store(y_ptr + at, x * weight)


@dataclass(frozen=True)
class Problem:
    tokens: Tensor
    weight: Tensor
    bound: int

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        peak = x.abs().max().item()  # 1
        rows = x.sum(-1).tolist()  # 1
        on_host = x.cpu()  # 1
        array = x.detach().to("cpu").numpy()  # 1
        scale = float(x[0, 0])  # 1
        print(x.shape, x)  # 1
        text = f"{x.mean():.3f}"  # 1
        other = np.asarray(x)  # 1
        same = torch.equal(x, x)  # 1
        return x * scale * peak * len(rows) * len(text) + on_host.sum() + array.sum() + other + same


class DataShapes(nn.Module):
    def forward(self, x: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
        counts = torch.bincount(chosen)  # 2
        places = (x > 0).nonzero()  # 2
        (where,) = torch.where(x[:, 0] > 0)  # 2
        kept = torch.masked_select(x, x > 0)  # 2
        rows = x[x[:, 0] > 0]  # 2
        named = x[mask]  # 2
        x[mask] = named * 2  # 2
        kinds = chosen.unique()  # 2
        repeated = x.repeat_interleave(counts, dim=0)  # 2
        x[mask] = 0.0
        return (
            x.sum() + places.sum() + where.sum() + kept.sum() + rows.sum() + kinds.sum() + repeated
        )


class PerElement(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(4)])
        self.offsets = torch.zeros(5, dtype=torch.int32)
        self.scratch: Tensor = torch.empty(4, hidden)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for expert in chosen:  # 3
            x = self.experts[expert](x)
        ends = chosen.tolist()  # 1
        for end in ends:  # 3
            x = x + end
        _kernel[(ends[-1],)](x, 1, BLOCK=16, TOKENS=1)  # 3
        for i in range(4):
            self.offsets[i + 1] = i * 2  # 4
        self.offsets[0] = 0  # 4
        self.offsets[:] = 0
        return x


class Branches(nn.Module):
    def forward(self, x: Tensor, position: Tensor, state: Tensor | None = None) -> Tensor | None:
        if (position + 1) % 4 != 0:  # 8
            return None
        if x.sum() > 0:  # 5
            x = x * 2
        assert x.isfinite().all()  # 5
        y = x if x[0, 0] > 0 else -x  # 5
        flag = x.any() and y.any()  # 5
        if state is not None and x.dim() == 2:
            x = x + state
        error = x.norm()
        while error > 1e-3:  # 11
            x = x / 2
            error = x.norm()
        count = int(position[0])  # 1
        if count > 3:  # 5
            x = x * 3
        if not count:  # 8
            return x
        return x[:count] + flag  # 10


class Keeps(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(hidden))
        self.cache = torch.zeros(0, hidden)
        self.gate = nn.Parameter(torch.zeros(8, hidden))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x])  # 9
        self.last_hidden = x  # 26
        self.scales = x.abs().amax(0)  # 17
        self.cache = None  # 17
        router = self.gate.float()  # 19
        return x @ router.t()


class Ledger:
    """A model has one, which lives as long as it does."""

    def __init__(self) -> None:
        self.rows = 0


LEDGER = Ledger()


class Counts(nn.Module):
    """Numbers that the host changes in a step."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.step = 0
        self.seen = {"steps": 0}
        self.ledger = Ledger()
        self.mean: Any = 0.0
        self.streams: list[Tensor] = []
        self.offsets = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1  # 7
        self.step = self.step + 1  # 7
        self.seen["steps"] += 1  # 7
        self.seen["steps"] = 2 * self.seen["steps"]  # 7
        self.ledger.rows += x.shape[0]  # 7
        LEDGER.rows += 1  # 7
        self.mean += x.mean()  # 26
        self.streams += [x]  # 26
        self.offsets[2] += self.step  # 4
        return x


class Sampling(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        token = logits.argmax(-1)
        if token.item() == 2:  # 12 8
            return logits
        ids = torch.tensor([3], device=logits.device)  # 7
        moved = torch.from_numpy(np.zeros(3))  # 7
        return logits[ids] + moved.to("cuda")  # 7


class Streams(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()  # 14
        torch.cuda.current_stream().synchronize()  # 14
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # 13
            x = x * 2
        return x


class SideStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = torch.cuda.Stream()
        self.other = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(self.side):  # 24
            y = x * 2
        self.other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.other):  # 24
            z = x * 3
        return x + y + z


class OrderedStreams(SideStreams):
    def forward(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(self.side)
        return x + y


class EarlyStarts(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        _first[(1,)](x, y, BLOCK=16, launch_pdl=True)
        _early[(1,)](y, weight, z, 2, BLOCK=16, PDL=True, launch_pdl=True)  # 24
        _kernel[(1,)](z, 1, BLOCK=16, TOKENS=1, launch_pdl=True)  # 24
        _kernel[(1,)](z, 1, BLOCK=16, TOKENS=1)
        _early[(1,)](y, weight, z, 2, BLOCK=16, PDL=False, launch_pdl=False)
        return z


class Launches(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        problem = Problem(x, scale, 3)
        _kernel[(1,)](x, 1, BLOCK=16, TOKENS=problem.num_tokens)  # 25
        _kernel[(1,)](x, 1, BLOCK=triton.next_power_of_2(len(x)), TOKENS=problem.bound)
        _tuned[(1,)](x, 1)  # 25
        _kernel[(1,)](scale.expand(4, 4), 1, BLOCK=16, TOKENS=1)  # 18
        wrapper.plan(x.shape[0])  # 23
        if _current is None:  # 27
            return x
        return x


class Wrapper:
    def run(self, x: Tensor) -> Tensor:
        return x


wrapper: object = object()


@graph_break
def attend(query: Tensor, out: Tensor) -> Tensor:
    scores = torch.zeros(4, 4)  # 6
    torch.matmul(query, query, out=out)
    return scores  # 6
