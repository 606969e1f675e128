# SPDX-License-Identifier: Apache-2.0
"""Branches on the step's data, each on a line that names its number in the checklist."""

from __future__ import annotations

from torch import Tensor, nn


class EndsInReturn(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if position[0] % 2 == 1:  # 8
            x = x + 1
            return x
        return x * 2


class EndsInNestedReturn(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if x.dim() == 2:
            if position[0] % 2 == 1:  # 8
                if x.shape[0] > 1:
                    return x
                return x + 1
        return x * 2


class LeavesUnless(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if not position[0] % 2 == 1:  # 8
            return x
        return x + 1


class LeavesForEither(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if position[0] > 5 or not position.all():  # 8
            return x
        return x + 1


class GoesOn(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for _ in range(3):
            if position[0] % 2 == 1:  # 8
                x = x + 1
                continue
            x = x * 2
        return x


class Breaks(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for _ in range(3):
            if position[0] % 2 == 1:  # 11
                break
            x = x + 1
        return x


class GoesOnUntil(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        while not (x.abs() < 1).all():  # 11
            x = x / 2
        return x


class LeavesElse(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if position[0] % 2 == 1:  # 5
            x = x + 1
        elif position[0] > 2:  # 8
            return x
        return x * 2


class Chooses(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x if not position.all() else x + 1  # 5


class Asserts(nn.Module):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        assert not x.isnan().any()  # 5
        return x + 1


MODULES: tuple[type[nn.Module], ...] = (
    EndsInReturn,
    EndsInNestedReturn,
    LeavesUnless,
    LeavesForEither,
    Chooses,
    Asserts,
    GoesOn,
    Breaks,
    GoesOnUntil,
    LeavesElse,
)
