# SPDX-License-Identifier: Apache-2.0
"""Which layers a step of made-up requests can leave out, and that it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layer_kinds import repeated_layers
from vllm.model_executor.layers.moe import has_mixtures
from vllm.model_executor.model_loader.base import initialize_model, set_default_torch_dtype
from vllm.model_executor.models.causal_lm import DecoderForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@dataclass(frozen=True)
class _Shape:
    rows: int
    scales: Tensor


def _double(x: Tensor) -> Tensor:
    return 2 * x


def _triple(x: Tensor) -> Tensor:
    return 3 * x


class _Impl:
    def __init__(self, window: int | None) -> None:
        self.window = window


class Layer(nn.Module):
    """What layers are made of: modules, parameters, settings, names, objects and functions."""

    def __init__(self, place: int, columns: int = 8) -> None:
        super().__init__()
        self.name = f"model.layers.{place}.mixer"
        self.inner = nn.Linear(columns, 4)
        self.window: int | None = None
        self.shape = _Shape(4, torch.ones(3))
        self.impl = _Impl(None)
        self.function: Callable[[Tensor], Tensor] = _double
        self.bound = self.inner.forward
        self.part = partial(_double)
        self.owner = [self]


def layers(kinds: str) -> list[nn.Module]:
    """One layer per letter; a letter is a width."""
    return [Layer(i, columns=ord(kind)) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("", []),
        ("a", [0]),
        ("aa", [0, 1]),
        ("aaaa", [0, 1]),
        ("aaabaaabaaab", [0, 1, 2, 3, 4]),
        ("abababab", [0, 1, 2]),
        ("aabbaa", [0, 1, 2, 3, 4]),
        ("aaaac", [0, 1, 3, 4]),
        ("abcd", [0, 1, 2, 3]),
    ],
)
def test_each_kind_stays_after_each_kind_that_precedes_it(kinds: str, kept: list[int]) -> None:
    assert sorted(set(range(len(kinds))) - repeated_layers(layers(kinds))) == kept


def _unaligned(layer: Any) -> None:
    layer.inner.bias = nn.Parameter(torch.empty(5)[1:])


def _same_function(layer: Any) -> None:
    layer.function = _double


CHANGES: dict[str, tuple[Callable[[Any], None], bool]] = {
    "nothing": (lambda layer: None, True),
    "a parameter's values": (lambda layer: layer.inner.weight.data.fill_(3), True),
    "an equal object": (lambda layer: setattr(layer, "impl", _Impl(None)), True),
    "the same function": (_same_function, True),
    "a parameter's dtype": (lambda layer: layer.inner.half(), False),
    "a parameter's address": (_unaligned, False),
    "a setting": (lambda layer: setattr(layer, "window", 128), False),
    "a setting's type": (lambda layer: setattr(layer, "window", "128"), False),
    "an object's setting": (lambda layer: setattr(layer.impl, "window", 128), False),
    "a field": (lambda layer: setattr(layer, "shape", replace(layer.shape, rows=5)), False),
    "a tensor in a field": (
        lambda layer: setattr(layer, "shape", replace(layer.shape, scales=torch.ones(4))),
        False,
    ),
    "a name of something else": (lambda layer: setattr(layer, "name", "other"), False),
    "one more attribute": (lambda layer: setattr(layer, "more", None), False),
    "one more module": (lambda layer: setattr(layer, "more", nn.Identity()), False),
    "a function": (lambda layer: setattr(layer, "function", _triple), False),
    "a method": (lambda layer: setattr(layer, "bound", layer.inner.extra_repr), False),
    "a partial function": (lambda layer: setattr(layer, "part", partial(_triple)), False),
    "a type": (lambda layer: setattr(layer, "impl", nn.Identity()), False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_makes_a_layer_another_kind(what: str) -> None:
    change, alike = CHANGES[what]
    made = layers("aaa")
    change(made[2])
    assert (2 in repeated_layers(made)) == alike


def without_memory(name: str) -> DecoderForCausalLM:
    """The model of a benchmark."""
    config = EngineArgs(
        str(BENCHMARKS / name), skip_tokenizer_init=True, max_model_len=64, language_model_only=True
    ).create_engine_config()
    assert config.model_config is not None
    with (
        torch.device("meta"),
        set_default_torch_dtype(config.model_config.dtype),
        set_current_vllm_config(config),
    ):
        built = initialize_model(config)
    assert isinstance(built, DecoderForCausalLM)
    return built


@pytest.fixture(scope="module")
def model() -> DecoderForCausalLM:
    """Qwen3.5-4B's 32 layers."""
    return without_memory("qwen3_5_4b")


def test_layers_with_experts_are_alike_too() -> None:
    """The 40 layers of a 35B mixture."""
    mixture = without_memory("qwen3_5_35b_a3b")
    assert mixture.repeated_layers() == frozenset(range(5, 40))
    assert has_mixtures(mixture)
    # 40 layers of 256 experts and a shared one, each of 3 x 512 x 2048.
    experts = sum(p.numel() for name, p in mixture.named_parameters() if ".experts." in name)
    assert experts == 40 * 257 * 3 * 512 * 2048


def test_a_hybrid_model_keeps_one_period_and_a_layer(model: DecoderForCausalLM) -> None:
    """Recurrent first, after itself, and around attention."""
    assert model.repeated_layers() == frozenset(range(5, 32))


def test_what_is_left_out_does_not_run(
    model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    for place, layer in enumerate(model.model.layers):

        def forward(positions: Tensor, stream: Any, place: int = place) -> tuple[Any, Tensor]:
            ran.append(place)
            return stream, stream.residual

        monkeypatch.setattr(layer, "forward", forward)
    monkeypatch.setattr(model.model, "norm", _Passing())
    model.set_aux_hidden_state_layers((0, 16, 32))
    embeds, positions = torch.zeros(2, 4), torch.zeros(2)

    def step() -> list[int]:
        ran.clear()
        _, aux = model(None, positions, inputs_embeds=embeds)
        assert len(aux) == 3, "each stream that was asked for is there"
        return list(ran)

    with model.leaving_out(frozenset(range(5, 32))):
        assert step() == [0, 1, 2, 3, 4]
        with model.leaving_out(frozenset({0})):
            assert step() == list(range(1, 32))
        assert step() == [0, 1, 2, 3, 4]
    assert step() == list(range(32))


class _Passing(nn.Module):
    def enter(self, stream: Any) -> tuple[Tensor, Tensor]:
        return stream.residual, stream.residual
