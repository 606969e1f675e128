# SPDX-License-Identifier: Apache-2.0
"""How a config dataclass is declared: validated fields that carry their own flag and help."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import dataclass_transform

from vllm.exceptions import VLLMValidationError

T = TypeVar("T")
_FLAG_KEY = "vllm_flag"


class FlagKind(enum.Enum):
    """How the text of a flag becomes a value; AUTO follows the field's annotation."""

    AUTO = enum.auto()
    #: an integer, with k/m/g (powers of 1000) and K/M/G (powers of 1024) suffixes
    HUMAN_INT = enum.auto()
    #: HUMAN_INT, `auto` or -1
    LENGTH = enum.auto()
    JSON = enum.auto()


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """A field's command-line side.

    `name`: the flag (underscored), where it differs from the field. `aliases`: short spellings.
    `choices`: allowed words where the annotation does not list them. `resolved`: when the flag is
    absent the value is computed from the model and the device, so the argument's default is None
    and not the field's.
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    kind: FlagKind = FlagKind.AUTO
    choices: tuple[str, ...] = ()
    resolved: bool = False


def option(
    *,
    help: str,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    kind: FlagKind = FlagKind.AUTO,
    choices: tuple[str, ...] = (),
    resolved: bool = False,
    flag: bool = True,
) -> Any:
    """A field with help; `flag=False` keeps it off the command line and out of `EngineArgs`."""
    info = FlagInfo(help, name, aliases, kind, choices, resolved)
    metadata = {_FLAG_KEY: info} if flag else {"help": help}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field[Any]) -> FlagInfo | None:
    """The command-line side of a field, or None when it has no flag."""
    info: FlagInfo | None = field.metadata.get(_FLAG_KEY)
    return info


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default value (a fresh one where it has a factory)."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@dataclass_transform(field_specifiers=(option, dataclasses.field))
def config(cls: type[T]) -> type[T]:
    """Make `cls` a validated dataclass that refuses unknown keys.

    Constructor errors are `VLLMValidationError` (a `ValueError`) in one plain sentence.
    """
    return _validated(cls, has_flags=True)


@dataclass_transform(field_specifiers=(option, dataclasses.field))
def json_config(cls: type[T]) -> type[T]:
    """A `config` that is the JSON of one flag: its fields are keys there, not flags."""
    return _validated(cls, has_flags=False)


def _validated(cls: type[T], has_flags: bool) -> type[T]:
    settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    made: Any = pydantic_dataclass(cls, config=settings)
    made.__init__ = _explain_errors(made, made.__init__, has_flags)
    return made


def _explain_errors(
    cls: type[Any], init: Callable[..., None], has_flags: bool
) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        check_keys(cls, kwargs)
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise _plain_error(cls, error, has_flags) from None

    return __init__


def _plain_error(cls: type[Any], error: ValidationError, has_flags: bool) -> VLLMValidationError:
    """The first of pydantic's findings, as a sentence that names the field, and its flag."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, VLLMValidationError):
        return cause
    if isinstance(cause, ValueError):
        return VLLMValidationError(str(cause))
    names = {field.name: field for field in dataclasses.fields(cls)}
    path = [str(part) for part in first["loc"]]
    dotted = ".".join(path)
    named = has_flags and path[:1] and path[0] in names
    info = flag_of(names[path[0]]) if named else None
    flag = f" ({flag_name(info.name or path[0])})" if info is not None else ""
    message = first["msg"][:1].lower() + first["msg"][1:]
    given = first["input"]
    text = f"{cls.__name__}.{dotted}{flag}: {message}; got {given!r}"
    return VLLMValidationError(text, dotted, given)


def check_keys(
    cls: type[Any],
    given: Mapping[str, Any],
    what: str | None = None,
    hidden: tuple[str, ...] = (),
) -> None:
    """Raise `VLLMValidationError` for a key that `cls` has no field for, or only a hidden one."""
    allowed = [f.name for f in dataclasses.fields(cls) if f.init and f.name not in hidden]
    for key in given:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise VLLMValidationError(
                f"{what or cls.__name__}: unknown key {key!r}{hint}; allowed keys: "
                + ", ".join(allowed),
                parameter=str(key),
                value=given[key],
            )


def flag_name(name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + name.replace("_", "-")


def merged(current: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """`current` updated with `value`, nested mappings key by key."""
    result = dict(current)
    for key, new in value.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            new = merged(old, new)
        result[key] = new
    return result


def build(cls: type[T], given: T | Mapping[str, Any], what: str) -> T:
    """A config from an object, which is copied, or a mapping; errors name the flag `what`."""
    if isinstance(given, cls):
        return copy.copy(given)
    if not isinstance(given, Mapping):
        raise VLLMValidationError(
            f"{what} must be a JSON object or a {cls.__name__}, got {given!r}", what, given
        )
    check_keys(cls, given, what)
    return cls(**given)
