# SPDX-License-Identifier: Apache-2.0
"""Flags derived from config dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
import typing
from typing import Any, Literal, TypeVar, Union

from vllm.config.base import FlagInfo, FlagKind, default_of, flag_of
from vllm.utils import flag_types

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """One flag: `name` is underscored, `config` and `field` say where its value goes."""

    name: str
    config: type[Any]
    field: str
    annotation: Any
    info: FlagInfo
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def flag_specs(cls: type[Any]) -> list[FlagSpec]:
    """The flags of a config dataclass, in field order."""
    hints = typing.get_type_hints(cls)
    specs = []
    for field in dataclasses.fields(cls):
        info = flag_of(field)
        if info is not None:
            name = info.name or field.name
            default = None if info.resolved else default_of(field)
            specs.append(FlagSpec(name, cls, field.name, hints[field.name], info, default))
    return specs


def add_dataclass_flags(
    parser: argparse.ArgumentParser, cls: type[Any], group: str | None = None
) -> None:
    """Add the flags of `cls` to `parser` under a help group (the class's name by default)."""
    title = group or cls.__name__
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    target = parser.add_argument_group(title, summary)
    for spec in flag_specs(cls):
        add_flag(target, spec)


def from_namespace(cls: type[C], namespace: argparse.Namespace) -> C:
    """The `cls` that a command line describes; flags it did not have keep their defaults."""
    values = vars(namespace)
    return cls(**{s.field: values[s.name] for s in flag_specs(cls) if s.name in values})


def add_flag(target: argparse._ActionsContainer, spec: FlagSpec) -> None:
    """Add one flag."""
    target.add_argument(
        *spec.info.aliases,
        spec.flag,
        dest=spec.name,
        default=spec.default,
        help=spec.info.help.replace("%", "%%"),
        **argument_settings(spec.annotation, spec.info),
    )


def argument_settings(annotation: Any, info: FlagInfo) -> dict[str, Any]:
    """The keywords of `add_argument` that parse a value of type `annotation`."""
    members, is_optional = _union_members(annotation)
    wrap = flag_types.optional if is_optional or info.resolved else (lambda convert: convert)
    if info.kind is FlagKind.JSON or _is_mapping(members):
        return {"type": wrap(flag_types.json_value), "metavar": "JSON"}
    if info.kind is FlagKind.HUMAN_INT:
        return {"type": wrap(flag_types.human_int), "metavar": "N"}
    if info.kind is FlagKind.LENGTH:
        return {"type": flag_types.optional(flag_types.length), "metavar": "N|auto"}
    if info.choices:
        return {"type": wrap(str), "choices": list(info.choices)}
    if members == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if bool in members and str in members:
        return {"nargs": "?", "const": True, "metavar": "TEXT"}
    literals = [value for m in members if typing.get_origin(m) is Literal for value in m.__args__]
    if literals:
        choices = [*literals, None] if is_optional else literals
        return {
            "type": wrap(type(literals[0])),
            "choices": choices,
            "metavar": _choice_list(choices),
        }
    return _plain_settings(members, wrap)


def _plain_settings(members: list[Any], wrap: Any) -> dict[str, Any]:
    for member in members:
        if typing.get_origin(member) is list:
            (item,) = typing.get_args(member)
            return {"type": item, "nargs": "+", "metavar": _metavar(item)}
    scalar = next(m for m in members if isinstance(m, type))
    if issubclass(scalar, enum.Enum):
        names = [entry.name for entry in scalar]
        return {"type": wrap(str), "choices": names, "metavar": _choice_list(names)}
    return {"type": wrap(scalar), "metavar": _metavar(scalar)}


def _union_members(annotation: Any) -> tuple[list[Any], bool]:
    """The alternatives of a union without None, and whether None was one."""
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return [annotation], False
    members = list(typing.get_args(annotation))
    rest = [m for m in members if m is not type(None)]
    return rest, len(rest) < len(members)


def _is_mapping(members: list[Any]) -> bool:
    return any(m is dict or typing.get_origin(m) is dict for m in members)


def _metavar(scalar: type[Any]) -> str:
    return {int: "N", float: "X"}.get(scalar, "TEXT")


def _choice_list(choices: list[Any]) -> str:
    return "{" + ",".join(str(choice) for choice in choices if choice is not None) + "}"
