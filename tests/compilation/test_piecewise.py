# SPDX-License-Identifier: Apache-2.0
"""Captures split at graph breaks: what is recorded, what runs when, and what goes wrong loudly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compilation.fake_graphs import Tape
from vllm.compilation.graph_break import graph_break
from vllm.compilation.monitor import is_capturing
from vllm.compilation.piecewise import capture
from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec


class Layer:
    """`x -> 10 * x + number of tokens of the step`, the sum behind a break."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.seen: list[int] = []

    @graph_break
    def add_tokens(self, x: Tensor, *, out: Tensor) -> None:
        assert not is_capturing()
        tokens = get_forward_context().num_tokens
        self.seen.append(tokens)
        self.tape.launch(lambda: torch.add(x, tokens, out=out))

    def forward(self, x: Tensor) -> Tensor:
        scaled, out = torch.zeros_like(x), torch.zeros_like(x)
        self.tape.launch(lambda: torch.mul(x, 10, out=scaled))
        self.add_tokens(scaled, out=out)
        return out


def _context(num_tokens: int) -> ForwardContext:
    return ForwardContext({}, {}, num_tokens=num_tokens)


def _two_layers(tape: Tape, x: Tensor) -> tuple[list[Layer], Callable[[], Tensor]]:
    layers = [Layer(tape), Layer(tape)]

    def run() -> Tensor:
        with set_forward_context(_context(0)):
            hidden = layers[1].forward(layers[0].forward(x))
            result = torch.zeros_like(hidden)
            tape.launch(lambda: torch.neg(hidden, out=result))
            return result

    return layers, run


def test_a_replay_is_graphs_and_callables_in_turn() -> None:
    tape, x = Tape(), torch.zeros(2)
    layers, run = _two_layers(tape, x)
    pieces, result = capture(run, tape.new_graph, split=True)
    assert len(pieces) == 5 and len(tape.graphs) == 3
    assert [layer.seen for layer in layers] == [[0], [0]]
    for value, tokens in ((1.0, 3), (2.0, 4)):
        x.fill_(value)
        with set_forward_context(_context(tokens)):
            pieces.replay()
        assert result.tolist() == [-(100 * value + 11 * tokens)] * 2
    assert layers[0].seen == [0, 3, 4]
    assert len(tape.graphs) == 3


def test_without_split_breaks_are_recorded_like_everything_else() -> None:
    tape, x = Tape(), torch.zeros(2)

    def run() -> Tensor:
        out = torch.zeros_like(x)
        whole(x, out)
        return out

    @graph_break
    def whole(x: Tensor, out: Tensor) -> None:
        tape.launch(lambda: torch.add(x, 1, out=out))

    pieces, result = capture(run, tape.new_graph, split=False)
    assert len(pieces) == 1 and result.tolist() == [0, 0]
    x.fill_(4)
    pieces.replay()
    assert result.tolist() == [5, 5]


def test_a_break_inside_a_break_is_part_of_it() -> None:
    tape, order = Tape(), []

    @graph_break
    def inner() -> None:
        order.append("inner")

    @graph_break
    def outer() -> None:
        order.append("outer")
        inner()

    def run() -> None:
        outer()
        tape.launch(lambda: order.append("graph"))

    pieces, _ = capture(run, tape.new_graph, split=True)
    assert len(pieces) == 3
    order.clear()
    pieces.replay()
    assert order == ["outer", "inner", "graph"]


def test_outside_a_capture_a_break_is_a_plain_call() -> None:
    calls = []

    @graph_break
    def work(value: int, *, more: int = 0) -> None:
        """What it does."""
        calls.append((value, more))

    work(1, more=2)
    assert calls == [(1, 2)]
    assert work.__name__ == "work" and work.__doc__ == "What it does."


def test_arguments_are_kept_as_aliases_only() -> None:
    """Else no graph could reuse the memory of the one before."""
    tape, aliased = Tape(), []

    def alias(tensor: Tensor) -> Tensor:
        aliased.append(tensor.shape)
        return tensor.clone()

    got: list[Any] = []

    @graph_break
    def work(x: Tensor, scale: float, *, out: Tensor) -> None:
        got.append((x, scale, out))

    x, out = torch.ones(3), torch.zeros(4)
    pieces, _ = capture(lambda: work(x, 2.0, out=out), tape.new_graph, split=True, alias=alias)
    pieces.replay()
    assert aliased == [x.shape, out.shape]
    for seen_x, scale, seen_out in got:
        assert seen_x is not x and seen_out is not out and scale == 2.0
    assert got[0][0] is got[1][0]


def test_a_value_that_no_graph_could_read_is_an_error() -> None:
    tape = Tape()

    @graph_break
    def work() -> None:
        return 3  # type: ignore[return-value]

    with pytest.raises(RuntimeError, match="work returned a value"):
        capture(work, tape.new_graph, split=True)
    _usable_after(tape)


@pytest.mark.parametrize("inside", [False, True])
def test_a_failed_capture_leaves_nothing_open(inside: bool) -> None:
    tape = Tape()

    @graph_break
    def work() -> None:
        if inside:
            raise KeyError("work")

    def run() -> None:
        work()
        raise KeyError("after")

    with pytest.raises(KeyError, match="work" if inside else "after"):
        capture(run, tape.new_graph, split=True)
    _usable_after(tape)


def _usable_after(tape: Tape) -> None:
    assert tape.open is None and not is_capturing()
    ran = []

    @graph_break
    def work() -> None:
        ran.append(1)

    work()
    pieces, _ = capture(work, tape.new_graph, split=True)
    pieces.replay()
    assert ran == [1, 1, 1] and len(pieces) == 3


class Careless(AttentionLayerBase):
    """Reads its metadata where a graph would keep it."""

    def __init__(self, tape: Tape) -> None:
        self.layer_name = "careless"
        self.tape = tape

    def forward(self) -> None:
        tokens = self.metadata()
        self.tape.launch(lambda: tokens)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        raise NotImplementedError

    def get_attn_backend(self) -> type[AttentionBackend]:
        raise NotImplementedError


class Careful(Careless):
    @graph_break
    def forward(self) -> None:
        super().forward()


class Declared(Careless):
    reads_fixed_addresses = True


def test_metadata_is_read_in_breaks_only() -> None:
    tape = Tape()
    with set_forward_context(ForwardContext({}, {"careless": 3})):
        with pytest.raises(RuntimeError, match="careless reads the batch's metadata inside"):
            capture(Careless(tape).forward, tape.new_graph, split=True)
        for kind in (Careful, Declared):
            capture(kind(tape).forward, tape.new_graph, split=True)
        capture(Careless(tape).forward, tape.new_graph, split=False)
        Careless(tape).forward()
