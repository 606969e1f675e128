# SPDX-License-Identifier: Apache-2.0
"""From checkpoint tensors to a module's parameters, with one report of everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from vllm import decisions
from vllm.model_executor.models.stacked_weights import StackedName, StackedNames, StackedShard
from vllm.model_executor.parameter import (
    ShardId,
    WeightDtypeError,
    WeightShapeError,
    default_weight_loader,
)
from vllm.model_executor.utils import get_weight_attr

Weights = Iterable[tuple[str, Tensor]]
FusedName = tuple[str, str, ShardId | tuple[ShardId, ...]]

_SHOWN = 20


class WeightsError(ValueError):
    """The checkpoint and the model disagree; the message lists where."""

    def __init__(self, problems: Sequence[str]) -> None:
        shown = [f"  {line}" for line in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            shown.append(f"  ... and {len(problems) - _SHOWN} more")
        super().__init__(
            f"the checkpoint does not fit the model: {len(problems)} problem(s)\n"
            + "\n".join(shown)
        )
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[WeightsError], tuple[tuple[str, ...]]]:
        """Between processes; the default would pass the message as the problems."""
        return type(self), (self.problems,)


@dataclass
class WeightsMapper:
    """Renames checkpoint tensors: by prefix (first match), substring, suffix; None drops one."""

    orig_to_new_prefix: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_substr: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)

    def map_name(self, name: str) -> str | None:
        """The new name, or None when the tensor is dropped."""
        for old, new in self.orig_to_new_substr.items():
            if old in name:
                if new is None:
                    return None
                name = name.replace(old, new, 1)
        for old, new in self.orig_to_new_prefix.items():
            if name.startswith(old):
                if new is None:
                    return None
                name = new + name.removeprefix(old)
                break
        for old, new in self.orig_to_new_suffix.items():
            if name.endswith(old):
                if new is None:
                    return None
                name = name.removesuffix(old) + new
                break
        return name

    def apply(self, weights: Weights) -> Iterable[tuple[str, Tensor]]:
        """The renamed stream without the dropped tensors."""
        return (
            (new, tensor) for name, tensor in weights if (new := self.map_name(name)) is not None
        )


class AutoWeightsLoader:
    """Loads a stream of tensors into `module` by name.

    `fused` lists `(parameter, checkpoint name, shard id)` path components: q_proj is shard "q" of
    qkv_proj; of several places for one name the first that the model has is meant. `stacked`
    names the tensors of single experts: see `StackedNames`. `skip_prefixes` are checkpoint prefixes
    the model has no use for; given as a mapping to reasons, each skip is recorded as a decision.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        fused: Sequence[FusedName] = (),
        stacked: Sequence[StackedName] = (),
        skip_prefixes: Mapping[str, str] | Sequence[str] = (),
    ) -> None:
        self._params = dict(module.named_parameters())
        self._modules = {name.rpartition(".")[0] for name in self._params}
        self._stacked = StackedNames(stacked, self._params)
        self._fused: dict[str, list[tuple[str, ShardId | tuple[ShardId, ...]]]] = {}
        for param, name, shard_id in fused:
            self._fused.setdefault(name, []).append((param, shard_id))
        reasons = skip_prefixes if isinstance(skip_prefixes, Mapping) else {}
        self._skips = {prefix: reasons.get(prefix, "") for prefix in skip_prefixes}

    def load_weights(self, weights: Weights, *, mapper: WeightsMapper | None = None) -> set[str]:
        """Load everything; returns the names of the loaded parameters.

        Raises WeightsError with every missing, surplus and mis-shaped tensor.
        """
        problems: list[str] = []
        skipped = dict.fromkeys(self._skips, 0)
        loaded: dict[str, set[str]] = {}
        for name, tensor in mapper.apply(weights) if mapper else weights:
            prefix = next((p for p in self._skips if name.startswith(p)), None)
            if prefix is not None:
                skipped[prefix] += 1
                continue
            target, shard_id = self._resolve(name)
            if target not in self._params:
                problems.append(f"surplus: {name} {list(tensor.shape)}")
                continue
            loaded.setdefault(target, set()).add(name)
            try:
                self._load(self._params[target], tensor, shard_id)
            except WeightShapeError as error:
                problems.append(f"mis-shaped: {name}: {error}")
            except WeightDtypeError as error:
                problems.append(f"mis-typed: {name}: {error}")
        problems += [f"missing: {name}" for name in self._missing(loaded)]
        if problems:
            raise WeightsError(problems)
        self._record(skipped)
        return set(loaded)

    @staticmethod
    def _load(
        param: Tensor, tensor: Tensor, shard_id: ShardId | tuple[ShardId, ...] | StackedShard | None
    ) -> None:
        loader = get_weight_attr(param, "weight_loader", default_weight_loader)
        if shard_id is None:
            loader(param, tensor)
        else:
            loader(param, tensor, shard_id)

    def _resolve(
        self, name: str
    ) -> tuple[str, ShardId | tuple[ShardId, ...] | StackedShard | None]:
        """The parameter that a checkpoint tensor belongs to, and its shard of it."""
        found = self._stacked.resolve(name)
        if found is not None:
            return found
        parts = name.split(".")
        for i, part in enumerate(parts):
            for param, shard_id in self._fused.get(part, ()):
                if ".".join([*parts[:i], param]) not in self._modules:
                    continue
                target = ".".join([*parts[:i], param, *parts[i + 1 :]])
                return (target, shard_id) if target in self._params else (name, None)
        return name, None

    def _missing(self, loaded: Mapping[str, set[str]]) -> list[str]:
        """Checkpoint names that were needed and did not come."""
        missing = []
        for target, param in self._params.items():
            if get_weight_attr(param, "optional", False):
                continue
            sources = loaded.get(target, set())
            needed = self._stacked.sources(target, whole=target in sources)
            if target not in sources:
                needed = needed or self._sources(target) or [target]
            missing += [name for name in needed if name not in sources]
        return missing

    def _sources(self, target: str) -> list[str]:
        """Checkpoint names that make up a fused parameter; empty for a plain one."""
        parts = target.split(".")
        names = [
            ".".join([*parts[:i], source, *parts[i + 1 :]])
            for i, part in enumerate(parts)
            for source, places in self._fused.items()
            if any(param == part for param, _ in places)
        ]
        return [name for name in names if self._resolve(name)[0] == target]

    def _record(self, skipped: Mapping[str, int]) -> None:
        for prefix, count in skipped.items():
            if count and self._skips[prefix]:
                decisions.record(
                    f"checkpoint tensors {prefix}*",
                    f"{count} not loaded",
                    self._skips[prefix],
                    "loading them",
                )
