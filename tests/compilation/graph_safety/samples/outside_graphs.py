# SPDX-License-Identifier: Apache-2.0
"""What runs only outside graphs, and what seems to: hazards are on lines that name their number in
the checklist. Read by the pass, never run."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.compilation import monitor
from vllm.compilation.monitor import is_capturing


class Sums:
    """Lives longer than a step."""

    def __init__(self, rows: int, busy: bool) -> None:
        self.rows, self.busy = rows, busy
        self.count = 0
        self.read = 0.0

    def takes(self, rows: int) -> bool:
        return rows <= self.rows and not is_capturing()

    def either(self, rows: int) -> bool:
        if rows > self.rows:
            return True
        return not is_capturing()

    def perhaps(self, rows: int) -> bool:
        if rows > self.rows:
            return unknown(rows)
        return not is_capturing()

    def untold(self, rows: int):
        if rows > self.rows:
            return is_capturing()

    def begin(self) -> None:
        self.count += 1

    def add(self) -> None:
        self.count += 1  # 7

    def counts(self) -> bool:
        self.count += 1  # 7
        return True

    def keep(self, x: Tensor) -> None:
        self.count += 1
        self.read = x.max().item()  # 1


class Open(Sums):
    """May be overridden."""

    def is_open(self) -> bool:
        return not is_capturing()


class AlwaysOpen(Open):
    def is_open(self) -> bool:
        return self.busy


def unknown(rows: int):
    return rows.__sizeof__()


class Layer(nn.Module):
    sums: Sums
    gate: Open

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.busy = False


class Outside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not is_capturing():
            self.count += 1
        if monitor.is_capturing():
            x = x + 1
        else:
            self.count += 1
        if self.busy or is_capturing():
            x = x + 1
        else:
            self.count += 1
        if is_capturing() or self.sums.begin():
            x = x + 1
        if not (is_capturing() or self.busy):
            self.count += 1
        if self.busy and self.sums.takes(len(x)):
            self.sums.begin()
        while not is_capturing() and self.busy:
            self.count += 1
        return x + 1 if is_capturing() else self.skip(x)

    def skip(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


class ReadsOutside(Layer):
    """Steps outside of graphs do not wait for the device either."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_capturing():
            self.count = int(x.sum())  # 1
        if self.sums.takes(len(x)):
            self.sums.keep(x)
        return x


class Inside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if is_capturing():
            self.count += 1  # 7
        if not is_capturing():
            x = x + 1
        else:
            self.count += 1  # 7
        return x + self.told(x) if is_capturing() else x

    def told(self, x: Tensor) -> Tensor:
        self.count += 1  # 7
        return x


class Unsure(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.busy or not is_capturing():
            self.count += 1  # 7
        if not (self.busy and is_capturing()):
            self.count += 1  # 7
        if self.sums.either(len(x)):
            self.count += 1  # 7
        if self.sums.perhaps(len(x)):
            self.count += 1  # 7
        if not self.sums.untold(len(x)):
            self.count += 1  # 7
        if self.gate.is_open():
            self.count += 1  # 7
        if not is_capturing() if self.busy else len(x) > 4:
            self.count += 1  # 7
        return x


class Before(Layer):
    """What is asked first runs in graphs, too."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sums.counts() and not is_capturing():
            x = x + 1
        if not is_capturing():
            x = x + 1
        self.sums.add()
        return x


class Renamed(Layer):
    """A name keeps nothing of it: it may be given something else."""

    def forward(self, x: Tensor) -> Tensor:
        eager = not is_capturing()
        try:
            eager = self.busy
        finally:
            x = x + 1
        if eager:
            self.count += 1  # 7
        flags = [not is_capturing()]
        flags[0] = True
        if flags[0]:
            self.count += 1  # 7
        return x
