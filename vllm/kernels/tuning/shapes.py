# SPDX-License-Identifier: Apache-2.0
"""Sizes of the kernels whose launch parameters are in a GPU's file, told by a model's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import or_
from typing import Any

from vllm.kernels.moe import ClampedSwiglu

#: padded head dimensions that tables have rows for
WIDTHS = (64, 128, 256)


@dataclass(frozen=True)
class AttentionShape:
    """Paged attention of one rank, over bf16 keys and values.

    `heads_apart`: heads of a prompt that are each a sequence of its own, as where latent attention
    is expanded, which has prefills alone; `num_heads` are then those of such a sequence. 0: none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    sinks: bool = False
    heads_apart: int = 0

    def __str__(self) -> str:
        text = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        text += f", window {self.sliding_window}" if self.sliding_window else ""
        text += f", {self.heads_apart} times" if self.heads_apart else ""
        return text + (", sinks" if self.sinks else "")

    @property
    def width(self) -> int | None:
        """Its tables' row, None where heads are too wide for any."""
        return _width(self.head_dim)


@dataclass(frozen=True)
class DeltaRuleShape:
    """The gated delta rule of one rank."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    beta_scale: float = 1.0

    def __str__(self) -> str:
        heads = f"{self.num_k_heads}/{self.num_v_heads} heads"
        return f"{heads} of {self.head_k_dim} x {self.head_v_dim}"

    @property
    def width(self) -> int | None:
        """As `AttentionShape.width`."""
        return _width(self.head_k_dim)

    @property
    def channels(self) -> int:
        """Of q, k and v."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


@dataclass(frozen=True)
class ConvolutionShape:
    """A causal convolution of one rank's channels."""

    channels: int
    taps: int
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.channels} channels, {self.taps} taps"


@dataclass(frozen=True)
class ExpertsShape:
    """The stack of experts of one rank, `top_k` of which, and with `shared` the last one, take a
    token. `inner`: rows of an expert's down projection's input. `scales`: shapes of those of float8
    stacks (`ExpertScales`), None for bf16."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    shared: bool = False
    gated: bool = True
    biases: bool = False
    clamp: ClampedSwiglu | None = None
    scales: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        text = f"{self.slots} of {self.num_experts} experts of {self.hidden} x {self.inner}"
        return text + ("" if self.scales is None else ", float8")

    @property
    def slots(self) -> int:
        """Experts of the stack that a token takes."""
        return self.top_k + self.shared

    def tokens_for(self, share: float) -> int:
        """Tokens of which an expert gets about `share` in the mean, at least one."""
        return max(1, int(share * self.num_experts / self.slots))


@dataclass(frozen=True)
class KernelShapes:
    """Of a model, or part of it: each shape once."""

    attention: tuple[AttentionShape, ...] = ()
    delta_rules: tuple[DeltaRuleShape, ...] = ()
    convolutions: tuple[ConvolutionShape, ...] = ()
    experts: tuple[ExpertsShape, ...] = ()

    def __or__(self, other: KernelShapes) -> KernelShapes:
        both: dict[str, Any] = {
            f.name: tuple(dict.fromkeys((*getattr(self, f.name), *getattr(other, f.name))))
            for f in fields(self)
        }
        return KernelShapes(**both)


class ReadsTiles(ABC):
    """A module whose kernels have launch parameters in a GPU's file."""

    @abstractmethod
    def kernel_shapes(self) -> KernelShapes:
        """Of this module without its children."""


def shapes_of(modules: Iterable[object]) -> KernelShapes:
    """Of all `modules` that have some."""
    found = (module.kernel_shapes() for module in modules if isinstance(module, ReadsTiles))
    return reduce(or_, found, KernelShapes())


#: of a 4B hybrid and a 35B mixture, with heads of every width
DEFAULT = KernelShapes(
    tuple(AttentionShape(16, 4, width) for width in WIDTHS),
    tuple(DeltaRuleShape(16, 32, width, 128) for width in WIDTHS),
    (ConvolutionShape(8192, 4),),
    (ExpertsShape(256, 8, 2048, 512),),
)


def _width(head_dim: int) -> int | None:
    return next((width for width in WIDTHS if head_dim <= width), None)
