# SPDX-License-Identifier: Apache-2.0
"""Hazards of whole steps, planted in the runner of a small attention model, on a CPU or a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm.kernels.rotary import RotaryProblem
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import paged
from vllm.v1.worker.model_runner import ModelRunner

#: called with the name of each step, before the next one
Between = Callable[[str], None]


def _nothing(step: str) -> None:
    pass


@contextmanager
def padding_reaches_a_cache(runner: ModelRunner) -> Iterator[Between]:
    """A kernel that takes the slot of padding for the first one."""

    def launch(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "qk_norm_rope_cache":
            (problem,) = args
            assert isinstance(problem, RotaryProblem)
            args = (replace(problem, slot_mapping=problem.slot_mapping.clamp(min=0)),)
        return run(*args, **kwargs)

    with current_platform.kernels.launched_through(launch):
        yield _nothing


class _CopiesTables(paged.PagedAttentionMetadataBuilder):
    """A stale table is one of padding, which names no block: rows that are real would read before
    the cache."""

    def build(self, common: CommonAttentionMetadata) -> paged.PagedAttentionMetadata:
        return super().build(replace(common, block_table=common.block_table.clamp(min=0)))


class _CopyingBackend(paged.PagedAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[paged.PagedAttentionMetadataBuilder]:
        return _CopiesTables


@contextmanager
def metadata_in_new_tensors(runner: ModelRunner) -> Iterator[Between]:
    layers = [layer for layer in runner.layers.values() if isinstance(layer, Attention)]
    before = layers[0].attn_backend
    for layer in layers:
        layer.attn_backend = _CopyingBackend
    yield _nothing
    for layer in layers:
        layer.attn_backend = before


class Counting(torch.nn.Module):
    """Multiplies by how often it ran, which Python counts."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding, self.count = embedding, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.count += 1
        hidden: Tensor = self.embedding(input_ids)
        return hidden * self.count


class Overflowing(torch.nn.Module):
    """What it gives is no number."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids)
        return hidden * float("inf")


class Reading(torch.nn.Module):
    """Looks at a value."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids)
        if hidden.sum() > 1e9:
            hidden = hidden * 2
        return hidden


@contextmanager
def _embedded_by(
    runner: ModelRunner, change: Callable[[torch.nn.Module], torch.nn.Module]
) -> Iterator[Between]:
    model = runner.model
    assert isinstance(model, DecoderForCausalLM)
    embedding = model.model.embed_tokens
    model.model.embed_tokens = change(embedding)  # type: ignore[assignment]
    try:
        yield _nothing
    finally:
        model.model.embed_tokens = embedding


def a_number_of_python(runner: ModelRunner) -> AbstractContextManager[Between]:
    return _embedded_by(runner, Counting)


def state_that_is_no_number(runner: ModelRunner) -> AbstractContextManager[Between]:
    return _embedded_by(runner, Overflowing)


def a_branch_on_a_value(runner: ModelRunner) -> AbstractContextManager[Between]:
    return _embedded_by(runner, Reading)


@contextmanager
def an_address_that_changes(runner: ModelRunner) -> Iterator[Between]:
    def move(step: str) -> None:
        tables = runner.block_tables.groups[0]
        tables.slots = tables.slots.clone()

    yield move


@dataclass(frozen=True)
class Plant:
    """`apply` plants it in a runner, inside the block; `message` is part of what is said of it, at
    the only line of `module` with `text`: where it is, or what reads it first."""

    apply: Callable[[ModelRunner], AbstractContextManager[Between]]
    hazard: int
    module: ModuleType
    text: str
    message: str
    steps: int = 3

    @property
    def place(self) -> tuple[str, int, int]:
        """Path, line and item."""
        path = self.module.__file__
        assert path is not None
        lines = Path(path).read_text().splitlines()
        (line,) = (n for n, line in enumerate(lines, 1) if self.text in line)
        return path, line, self.hazard


_HERE = sys.modules[__name__]
_KERNEL = "current_platform.kernels.qk_norm_rope_cache(problem)"
PLANTS = (
    Plant(
        padding_reaches_a_cache, 21, attention, _KERNEL, "to the state memory in a step of padding"
    ),
    Plant(metadata_in_new_tensors, 22, paged, "=m.block_table[: m.num_decodes]", "metadata"),
    Plant(a_number_of_python, 7, _HERE, "return hidden * self" + ".count", "from Python"),
    Plant(
        an_address_that_changes,
        17,
        attention,
        _KERNEL,
        "block_tables.groups[0].slots, which was",
        2,
    ),
    Plant(
        state_that_is_no_number, 28, _HERE, "return hidden * float" + "(", "holds NaN or infinities"
    ),
)
#: what no GPU captures, so that its check ends there
BRANCH = Plant(a_branch_on_a_value, 5, _HERE, "if hidden.sum()" + " > 1e9", "to the host")
