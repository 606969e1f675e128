# SPDX-License-Identifier: Apache-2.0
"""What a way of quantising weights provides: parameters, their loaders, and the product."""

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm.exceptions import VLLMValidationError
from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.moe import ExpertScales
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.model_executor.models.weights import WeightsMapper
from vllm.model_executor.parameter import ExpertStack, ShardId, WeightLayout
from vllm.platforms import current_platform

#: an `nn.Module` with the parameters that its method made
Layer = Any
FusedName = tuple[str, str, ShardId | tuple[ShardId, ...]]


class LinearMethod(ABC):
    """How one linear layer keeps its weight and multiplies by it."""

    @property
    def takes_fp8_rows(self) -> bool:
        """Whether `apply` takes activations that the op before has made float8."""
        return False

    @abstractmethod
    def create_weights(
        self, layer: Layer, layout: WeightLayout, params_dtype: torch.dtype | None
    ) -> None:
        """Register the layer's parameters, with their weight loaders, on the default device."""

    def process_weights_after_loading(self, layer: Layer) -> None:  # noqa: B027
        """Derive what the product needs from the loaded parameters; after every (re)load."""

    @abstractmethod
    def apply(self, layer: Layer, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor:
        """`x [..., in] -> [..., out]` in the dtype of `x`; float8 only if `takes_fp8_rows`."""

    def apply_from(self, first: int, layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
        """The features of `apply` from number `first` on, `[..., out - first]`."""
        return self.apply(layer, x, bias)[..., first:]

    def apply_after_norm(
        self, layer: Layer, stream: ResidualStream, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`apply` to the stream's norm, `[tokens, out]`, and the stream added up."""
        normed, total = current_platform.kernels.enter(stream, norm)
        return self.apply(layer, normed, bias), total

    def apply_and_add(
        self, layer: Layer, x: Tensor | Fp8Rows, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        """`apply`, as a branch of the stream `residual [tokens, out]`."""
        return ResidualStream(residual, self.apply(layer, x, bias))


class ExpertsMethod(ABC):
    """Makes and loads stacks of matrices `[experts, rows, columns]`.

    A checkpoint has the matrices one by one, or those of all routed experts as one tensor.
    """

    @abstractmethod
    def create_weights(
        self, layer: Layer, name: str, layout: WeightLayout, stack: ExpertStack
    ) -> None:
        """Register the stack `name`, each matrix of this `layout`, and what belongs to it."""

    @abstractmethod
    def scales(self, layer: Layer) -> ExpertScales | None:
        """Of the layer's stacks `gate_up_proj` and `down_proj`; None for 16-bit ones."""


class QuantizationConfig(ABC):
    """What a checkpoint, or the user, says about the weights of a whole model.

    `excluded`: module names, as in the checkpoint, whose weights are not quantised: a module's
    full name, a parent's, its last parts, or `re:` and a regular expression. A module that is fused
    here may also be listed as one (`in_proj_ba`).
    """

    #: the method, as checkpoints and the flag call it
    name: str
    #: where the checkpoint calls a parameter otherwise: its suffix -> ours
    suffixes: Mapping[str, str] = {}

    def __init__(self, excluded: Collection[str] = ()) -> None:
        self.excluded = tuple(excluded)
        self._excluded = self.excluded
        self._fused: dict[str, list[str]] = {}
        self._fused_into: dict[str, list[str]] = {}
        self._mapper = WeightsMapper()

    def use_names(self, fused: Sequence[FusedName], mapper: WeightsMapper) -> None:
        """Learn how the model calls what the checkpoint names; called when the model is built."""
        self._fused, self._fused_into = {}, {}
        for module, source, _ in fused:
            self._fused.setdefault(module, []).append(source)
            self._fused_into.setdefault(source, []).append(module)
        self._mapper = mapper
        # A mapper has parts of tensors' names, which go on behind a module's.
        names = (n if _is_pattern(n) else mapper.map_name(f"{n}.") for n in self.excluded)
        self._excluded = tuple(name.removesuffix(".") for name in names if name is not None)

    def leaves_small(self, rows: int) -> bool:
        """Whether a projection to `rows` features is left in the model's dtype for its size."""
        return False

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod:
        """The method of the linear layer called `prefix`; ValueError where it cannot have one."""

    @abstractmethod
    def get_experts_method(self, prefix: str) -> ExpertsMethod:
        """The method of the experts called `prefix`; ValueError where they cannot have one."""

    def is_excluded(self, prefix: str) -> bool:
        """Whether the checkpoint keeps the linear layer called `prefix` in the model's dtype.

        Raises ValueError for a fused layer of which it keeps only some matrices.
        """
        parent, _, last = prefix.rpartition(".")
        sources = self._fused.get(last) or [last]
        names = [f"{parent}.{source}" if parent else source for source in sources]
        kept = [name for name in names if self._lists(name)]
        if kept and len(kept) < len(names):
            raise VLLMValidationError(
                f"{prefix}: the checkpoint does not quantise {', '.join(kept)} but the other "
                "matrices of the same input; all or none of them must be quantised"
            )
        return bool(kept)

    def _lists(self, name: str) -> bool:
        parent, _, last = name.rpartition(".")
        fused = (f"{parent}.{module}" for module in self._fused_into.get(last, ()))
        names = [name, *fused]
        stored = {each for one in names for each in _stored_names(self._mapper, one)}
        return any(
            _matches(entry, each)
            for entry in self._excluded
            for each in (stored if _is_pattern(entry) else names)
        )


def _stored_names(mapper: WeightsMapper, name: str) -> set[str]:
    """What a checkpoint may call the module that is called `name` here."""
    target = f"{name}."
    found = {target}
    for old, new in mapper.orig_to_new_prefix.items():
        found |= {old + each.removeprefix(new) for each in found if new and each.startswith(new)}
    for old, new in mapper.orig_to_new_substr.items():
        found |= {each.replace(new, old, 1) for each in found if new and new in each}
    mapped = {each for each in found if mapper.map_name(each) == target}
    return {each.removesuffix(".") for each in mapped | {target}}


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or "*" in entry


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if "*" in entry:
        return any(fnmatch.fnmatchcase(name, each) for each in (entry, f"{entry}.*"))
    return f".{entry}." in f".{name}."
