# SPDX-License-Identifier: Apache-2.0
"""Hazards that replays show, each on a line that names its number in the checklist. Run on a CPU.

`CASES`: a function, the inputs of its steps, and what happens before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tests.compilation.graph_safety.samples import replayed_phase
from tests.compilation.graph_safety.samples.replayed_phase import phase
from vllm.compilation.graph_break import graph_break
from vllm.platforms import current_platform

HIDDEN = 4
Steps = Sequence[Sequence[Tensor]]


class Reads(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        peak = x.abs().max().item()  # 1
        rows = x.tolist()  # 1
        array = x.numpy()  # 1
        return x + position[0] + 0 * (len(rows) + len(array) + (peak > 0))


class DataShapes(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]  # 2
        counts = torch.bincount(position)  # 2
        return rows.sum() + counts.sum()


class PerExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(8)])

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for expert in position.unique().tolist():  # 2 3
            x = self.experts[expert](x)
        return x


class PythonElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = torch.zeros(4)
        self.count = 0

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.count += 1
        self.offsets[2] = self.count  # 4
        return x + self.offsets


class Branches(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if position[0] > 2:  # 5
            x = x * 2
        return x + 1


class BranchOnHost(nn.Module):
    """The host's own number decides, which no read tells."""

    length = 0

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.length += 1
        if self.length > 3:
            x = x.exp()  # 5
        return x + 1


class Break(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.zeros(3, HIDDEN)

    @graph_break
    def attend(self, x: Tensor, out: Tensor) -> None:
        self.scores = torch.zeros_like(x)  # 6
        out.copy_(x * x.max().item())  # 1

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.attend(x + 1, out)
        return out + self.scores


class NewInputs(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        ids = torch.tensor([0, 2], device=x.device)  # 7
        return x[ids]


class CountedSteps(nn.Module):
    step = 0

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.step += 1
        return x * self.step  # 7


class LeavesEarly(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if position[0] % 2 == 1:  # 8
            return x
        return x + 1


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(0, HIDDEN)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, x])  # 9
        return x + self.keys.sum(0)


class GrowingView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(64, HIDDEN)
        self.length = 0

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.length += 1
        return x + self.keys[: self.length].sum(0)  # 9


class Holds(nn.Module):
    """Memory that grows: what a step makes is never given back."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.kept.append(x * 2)  # 9
        return x + 1


class Gathers(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x[: position[0] % 3]  # 10


class Converges(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        while x.norm() > 1:  # 11
            x = x / 2
        return x


class Samples(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        token = x.sum(0).argmax()
        return x * token.item()  # 12


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(HIDDEN)

    def rescale(self, step: int) -> None:
        self.scale = torch.full_like(self.scale, step)


class Freed(Scaled):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * self.scale  # 15


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(3, 2)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        torch.mul(x, 2, out=self.out)  # 16
        return self.out + 1


class Replaced(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.scale

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * self.scale  # 17


class Refilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(HIDDEN)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + self.total
        self.total = torch.zeros_like(x[0])  # 17
        return x


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        rows = self.weight.expand(len(x), HIDDEN)
        return x + current_platform.kernels.argmax_rows(rows).unsqueeze(1)  # 18


class Converts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.ones(2, HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x @ self.router.float().t()  # 19


class RoutesById(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert_of = torch.arange(8) % 3
        self.ids: Tensor | None = None

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if self.ids is None:
            self.ids = position.clone()  # 20
        return x * self.expert_of[self.ids].unsqueeze(1)


class Plans(nn.Module):
    def plan(self, lengths: Tensor) -> int:
        return max(lengths.tolist())  # 23

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x * (self.plan(position) > 0)


class ChangesDevice(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        torch.cuda.set_device(1)  # 13
        return x * 2


_done = torch.Event(device="cpu")


class Synchronizes(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        _done.synchronize()  # 14
        torch.cpu.synchronize()  # 14
        x = x + 1
        torch.cuda.synchronize()  # 14
        return x


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (16, 32)], key=["n"])
@triton.jit
def _tuned(x_ptr, n, BLOCK: tl.constexpr):
    pass


class Tunes(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        _tuned[(1,)](x, 3)  # 25
        return x.sin()


class ImportsByValue(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + (1 if phase % 2 else 2)  # 27

    def change(self, step: int) -> None:
        replayed_phase.phase = step


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3, HIDDEN)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        out = x + self.last
        self.last = x * 2  # 26
        return out


@dataclass(frozen=True)
class Case:
    """What to capture; `before` a step."""

    module: nn.Module
    steps: Steps
    before: Callable[[int], None] = lambda step: None
    split: bool = False


def steps() -> Steps:
    """Six steps, every input changed between them."""
    source = torch.Generator().manual_seed(3)
    rows = [torch.randn(3, HIDDEN, generator=source) * (1 + 2 * i) for i in range(6)]
    places = [torch.tensor([i + 1, 2 * i % 7, 5]) for i in range(6)]
    return list(zip(rows, places, strict=True))


def cases(device: str = "cpu") -> list[Case]:
    """Every module of this file with what it reads, on a device; a fresh one each."""
    inputs = [[tensor.to(device) for tensor in step] for step in steps()]
    plain = [Reads, DataShapes, PerExpert, PythonElement, Branches, BranchOnHost, NewInputs]
    plain += [CountedSteps, LeavesEarly, Grows, GrowingView, Holds, Gathers, Converges, Samples]
    plain += [Narrow, Refilled, Broadcast, Converts, RoutesById, Plans, HandsOn]
    plain += [ChangesDevice, Synchronizes, Tunes]
    with torch.device(device):
        found = [Case(module(), inputs) for module in plain]
        found.append(Case(Break(), inputs, split=True))
        imports = ImportsByValue()
        found.append(Case(imports, inputs, imports.change))
        for scaled in (Freed(), Replaced()):
            found.append(Case(scaled, inputs, scaled.rescale))
    return found
