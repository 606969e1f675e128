# SPDX-License-Identifier: Apache-2.0
"""Several readers of one residual stream: each gets its own layers, the target is asked once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3
from vllm.v1.worker.residual_tap import ResidualTap

INPUTS = cast(Any, "inputs")


class Target(nn.Module, EagleModelMixin, SupportsEagle3):
    """The stream after k layers is k."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self._set_aux_hidden_state_layers(layers)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return ()

    def forward(self) -> Any:
        aux: list[Tensor] = []
        for layer in range(5):
            self._maybe_add_hidden_state(aux, layer, torch.full((2, 3), float(layer)), None)
        hidden = torch.full((2, 3), -1.0)
        return (hidden, aux) if self.aux_hidden_state_layers else hidden


class Reader:
    def __init__(self, *ids: int) -> None:
        self.residual_layer_ids = ids
        self.seen: list[float] = []

    def observe(self, inputs: Any, hidden: Tensor, residual: Sequence[Tensor]) -> None:
        assert inputs is INPUTS and (hidden == -1).all()
        self.seen = [float(stream[0, 0]) for stream in residual]


def test_ids_are_merged_and_each_reader_gets_its_own() -> None:
    target, capture, drafter, none = Target(), Reader(4, 2, 2), Reader(0, 2), Reader()
    tap = ResidualTap(target, [capture, drafter, none])
    assert target.aux_hidden_state_layers == (0, 2, 4)
    assert (tap.read(INPUTS, target()) == -1).all()
    assert (capture.seen, drafter.seen, none.seen) == ([2, 2, 4], [0, 2], [])


def test_without_readers_nothing_is_asked() -> None:
    target = Target()
    tap = ResidualTap(target, [None])
    assert target.aux_hidden_state_layers == () and (tap.read(INPUTS, target()) == -1).all()
    ResidualTap(nn.Linear(1, 1), [Reader()])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Linear cannot return hidden states"):
        ResidualTap(nn.Linear(1, 1), [Reader(1)])
    tap = ResidualTap(Target(), [Reader(1, 3)])
    with pytest.raises(ValueError, match=r"returned 1 hidden states for layer ids \[1, 3\]"):
        tap.read(INPUTS, (torch.zeros(1), [torch.zeros(1)]))
