# SPDX-License-Identifier: Apache-2.0
"""Flags derived from config dataclasses, and how their text becomes values."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union

from vllm.utils.options import FlagInfo, FlagKind, default_of, flag_name, flag_of

C = TypeVar("C")

_FACTORS = {"": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS |= {_letter: 1000**_power, _letter.upper(): 1024**_power}
_NUMBER = re.compile(r"(-?\d+)(?:\.(\d+))?(?:([kKmMgGtT]?)|([KMGT])i)")


def human_int(text: str) -> int:
    """`8192`, `8k` (8000), `8K` or `8Ki` (8192), `25.6k` (25600); also m/M, g/G, t/T.

    Raises `argparse.ArgumentTypeError` for other text and for values that are not whole.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer; write 8192, 8k (8000) or 8K (8192)"
        )
    whole, fraction, suffix, binary = match.groups()
    digits = fraction or ""
    scaled = int(whole + digits) * _FACTORS[binary or suffix]
    if scaled % 10 ** len(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return scaled // 10 ** len(digits)


def length(text: str) -> int:
    """`human_int`, or `auto` (-1)."""
    return -1 if text == "auto" else human_int(text)


def json_value(text: str) -> Any:
    """A JSON document; `argparse.ArgumentTypeError` says where it is broken."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}; got {text!r}") from None


def optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """`convert`, except that the empty text and `None` mean no value."""

    def parse(text: str) -> Any:
        return None if text in ("", "None") else convert(text)

    parse.__name__ = convert.__name__
    return parse


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
        return flag_name(self.name)


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
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    target = parser.add_argument_group(group or cls.__name__, summary)
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
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    is_optional = type(None) in members or info.resolved
    members = tuple(member for member in members if member is not type(None))
    kinds = [typing.get_origin(member) or member for member in members]
    if info.kind is FlagKind.JSON or dict in kinds:
        convert, metavar = json_value, "JSON"
    elif info.kind is FlagKind.HUMAN_INT:
        convert, metavar = human_int, "N"
    elif info.kind is FlagKind.LENGTH:
        convert, metavar = length, "N|auto"
    elif info.choices:
        return {"type": str, "choices": list(info.choices)}
    elif kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    elif bool in kinds:
        return {"nargs": "?", "const": True, "metavar": "TEXT"}
    elif list in kinds:
        (item,) = typing.get_args(members[kinds.index(list)])
        return {"type": item, "nargs": "+", "metavar": _METAVARS[item]}
    elif Literal in kinds:
        words = typing.get_args(members[kinds.index(Literal)])
        shown = "{" + ",".join(words) + "}"
        if is_optional:
            return {"type": optional(str), "choices": [*words, None], "metavar": shown}
        return {"choices": list(words), "metavar": shown}
    else:
        convert, metavar = kinds[0], _METAVARS[kinds[0]]
    return {"type": optional(convert) if is_optional else convert, "metavar": metavar}


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
