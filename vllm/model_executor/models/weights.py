# SPDX-License-Identifier: Apache-2.0
"""From checkpoint tensors to a module's parameters, with one report of everything that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.kernels.fp8 import FP8, GROUP
from vllm.model_executor.parameter import (
    SHARED_EXPERT,
    ShardId,
    WeightDtypeError,
    WeightShapeError,
    WeightShardError,
    default_weight_loader,
)
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
_WEIGHT = "weight"
_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALE = "input_scale"
#: the output head's name in the model
LM_HEAD = "lm_head.weight"


class StackedNames:
    """Finds the parameter and shard of one expert's tensor.

    A stacked parameter has the attribute `stacked`: the experts that may come on their own. Scales
    of float8 weights are named like the weights, with a suffix; one with `drops_input_scales` takes
    no scales of activations.
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

    def drops(self, name: str) -> bool:
        """Whether the tensor is a scale of activations that the experts' stack has no use for."""
        matrix, _, kind = name.rpartition(".")
        if kind != _INPUT_SCALE:
            return False
        found = self.resolve(f"{matrix}.{_WEIGHT}")
        param = self._params[found[0]] if found else self._params.get(matrix)
        return param is not None and bool(get_weight_attr(param, "drops_input_scales", False))

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


Weights = Iterable[tuple[str, Tensor]]
FusedName = tuple[str, str, ShardId | tuple[ShardId, ...]]

_SHOWN = 20


class WeightsError(VLLMValidationError):
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

    def __reduce__(self) -> tuple[Any, ...]:
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


#: a buffer that checkpoints of older transformers have, as Llama 2's
_ROTARY_BUFFER = ".rotary_emb.inv_freq"


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

        Raises WeightsError with every tensor that is missing, surplus, mis-shaped or of a shard
        that its parameter has not.
        """
        problems: list[str] = []
        skipped = dict.fromkeys(self._skips, 0)
        buffers = 0
        loaded: dict[str, dict[Any, str]] = {}
        for name, tensor in mapper.apply(weights) if mapper else weights:
            prefix = next((p for p in self._skips if name.startswith(p)), None)
            if prefix is not None:
                skipped[prefix] += 1
                continue
            if name.endswith(_ROTARY_BUFFER):
                buffers += 1
                continue
            if self._stacked.drops(name):
                continue
            target, shard_id = self._resolve(name)
            if target not in self._params:
                problems.append(f"surplus: {name} {list(tensor.shape)}")
                continue
            parts = loaded.setdefault(target, {})
            if (other := _same_part(parts, shard_id)) is not None:
                problems.append(f"surplus: {name} {list(tensor.shape)} beside {other}")
                continue
            parts[shard_id] = name
            try:
                self._load(self._params[target], tensor, shard_id)
            except WeightShapeError as error:
                problems.append(f"mis-shaped: {name}: {error}")
            except WeightDtypeError as error:
                problems.append(f"mis-typed: {name}: {error}")
            except WeightShardError as error:
                problems.append(f"wrong shard: {name}: {error}; see the model's `fused_names`")
        problems += [f"missing: {name}" for name in self._missing(loaded)]
        if problems:
            raise WeightsError(problems)
        record_unused(skipped, self._skips)
        if buffers:
            why = "the config says how positions rotate"
            decisions.record(
                f"checkpoint tensors *{_ROTARY_BUFFER}", "not loaded", why, "loading them"
            )
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

    def _missing(self, loaded: Mapping[str, Mapping[Any, str]]) -> list[str]:
        """Checkpoint names that were needed and did not come."""
        missing = []
        for target, param in self._params.items():
            if get_weight_attr(param, "optional", False):
                continue
            sources = set(loaded.get(target, {}).values())
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


def _of_shared_expert(shard_id: Any) -> bool:
    return isinstance(shard_id, tuple) and shard_id[0] == SHARED_EXPERT


def _same_part(parts: Mapping[Any, str], shard_id: Any) -> str | None:
    """Of the tensors that came for a parameter, the one that is this shard already, or a whole that
    it is of. A shared expert comes besides a whole of the routed ones."""
    if shard_id is None:
        return next((name for part, name in parts.items() if not _of_shared_expert(part)), None)
    return parts.get(shard_id, None if _of_shared_expert(shard_id) else parts.get(None))


def record_unused(counts: Mapping[str, int], reasons: Mapping[str, str]) -> None:
    """A decision for each prefix of `reasons` that names have, and how many."""
    for prefix, count in counts.items():
        if count and reasons[prefix]:
            decisions.record(
                f"checkpoint tensors {prefix}*",
                f"{count} not loaded",
                reasons[prefix],
                "loading them",
            )


def widened(
    weights: Iterable[tuple[str, Tensor]], modules: Collection[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors, the float8 ones of layers called `modules` times their scales.

    Those are kept until their partners come; what stays alone passes as it is, to be reported.
    Scales of such layers' activations are left out. Raises WeightsError for a scale's shape.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        meant = layer.rpartition(".")[2] in modules
        if not meant or kind not in (_WEIGHT, *_SCALES, _INPUT_SCALE):
            yield name, tensor
        elif kind == _WEIGHT and tensor.dtype is not FP8:
            yield name, tensor
        elif kind != _INPUT_SCALE:
            parts = waiting.setdefault(layer, {})
            parts[kind] = tensor
            if _WEIGHT in parts and len(parts) > 1:
                scale_kind = next(each for each in _SCALES if each in parts)
                try:
                    wide = _times(parts[_WEIGHT], parts[scale_kind]).to(dtype)
                except WeightShapeError as error:
                    raise WeightsError([f"mis-shaped: {layer}.{scale_kind}: {error}"]) from error
                yield f"{layer}.{_WEIGHT}", wide
                del waiting[layer]
                decisions.record(
                    f"float8 weights of {layer.rpartition('.')[2]}",
                    f"made {str(dtype).removeprefix('torch.')} while they load",
                    "its parts are multiplied one by one",
                    "keeping float8",
                )
    for layer, parts in waiting.items():
        yield from ((f"{layer}.{kind}", tensor) for kind, tensor in parts.items())


def _times(values: Tensor, scale: Tensor) -> Tensor:
    """`values [rows, columns]` by one scale, one per row, or one per block of 128 x 128; fp32."""
    rows, columns = values.shape
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    if scale.numel() in (1, rows):
        return values.float() * scale.float().reshape(-1, 1)
    if tuple(scale.shape) != blocks:
        raise WeightShapeError(blocks, scale.shape)
    wide = scale.float().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return values.float() * wide[:rows, :columns]
