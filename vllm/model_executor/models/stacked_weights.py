# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors of single experts, which are one parameter for all experts here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from vllm.model_executor.parameter import SHARED_EXPERT, ShardId
from vllm.model_executor.utils import get_weight_attr

#: `(expert, section)`: see `StackedName`
StackedShard = tuple[ShardId, ShardId | tuple[ShardId, ...]]
#: `(parameter, checkpoint name, section)`, dotted from the module that has the parameter. `*` is
#: an expert's number; without one the name is the shared expert's. The shard id of a tensor is
#: `(expert, section)`, where expert is the number or `SHARED_EXPERT`; several sections that are one
#: tensor are a tuple.
StackedName = tuple[str, str, ShardId | tuple[ShardId, ...]]
#: of the weights themselves, and of their scales by rows and by blocks
_SUFFIXES = ("", "_scale", "_scale_inv")


class StackedNames:
    """Finds the parameter and shard of one expert's tensor.

    A stacked parameter has the attribute `stacked`: the experts that may come on their own. Scales
    of float8 weights are named like the weights, with a suffix.
    """

    def __init__(self, names: Sequence[StackedName], params: Mapping[str, Tensor]) -> None:
        self._names = [
            (f"{param}{suffix}", tuple(f"{name}{suffix}".split(".")), section)
            for param, name, section in names
            for suffix in _SUFFIXES
        ]
        self._heads = {pattern[0] for _, pattern, _ in self._names}
        self._params = params

    def resolve(self, name: str) -> tuple[str, StackedShard] | None:
        """Parameter and shard id; None for a tensor that belongs to no stack."""
        parts = name.split(".")
        for i in (i for i, part in enumerate(parts) if part in self._heads):
            for param, pattern, section in self._names:
                expert = _match(pattern, parts[i:])
                target = ".".join([*parts[:i], param])
                if expert is not None and expert in self._experts(target):
                    return target, (expert, section)
        return None

    def sources(self, target: str, whole: bool) -> list[str]:
        """Names that make up a parameter; `whole`: besides a tensor of all routed experts."""
        found = []
        for param, pattern, _ in self._names:
            if not f".{target}".endswith(f".{param}"):
                continue
            prefix = target.removesuffix(param)
            for expert in self._experts(target):
                routed = expert != SHARED_EXPERT
                if routed == ("*" in pattern) and not (whole and routed):
                    parts = (str(expert) if part == "*" else part for part in pattern)
                    found.append(prefix + ".".join(parts))
        return found

    def _experts(self, target: str) -> Sequence[ShardId]:
        param = self._params.get(target)
        return () if param is None else get_weight_attr(param, "stacked", ())


def _match(pattern: Sequence[str], parts: Sequence[str]) -> ShardId | None:
    """The expert that `parts` names, None where they are not of the pattern."""
    if len(pattern) != len(parts):
        return None
    expert: ShardId = SHARED_EXPERT
    for wanted, part in zip(pattern, parts, strict=True):
        if wanted == "*" and part.isdecimal():
            expert = int(part)
        elif wanted != part:
            return None
    return expert
