# SPDX-License-Identifier: Apache-2.0
"""Classes named in configuration: by dotted path, or by a name in a registry."""

from __future__ import annotations

import importlib
from typing import Any, Generic, TypeVar

from vllm.exceptions import VLLMValidationError

T = TypeVar("T")


def resolve_class(path: str) -> type[Any]:
    """`"package.module.Class"` -> the class; ValueError when there is no such class."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise VLLMValidationError(f"{path!r} is not a dotted path of the form package.module.Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise VLLMValidationError(f"cannot import {path!r}: {error}") from error
    if not isinstance(found, type):
        raise VLLMValidationError(f"{path!r} is not a class")
    return found


class ClassRegistry(Generic[T]):
    """Maps names to subclasses of `base`, imported when first asked for; `what` names the kind in
    errors."""

    def __init__(self, what: str, base: type[T]) -> None:
        self._what = what
        self._base = base
        self._entries: dict[str, str | type[T]] = {}

    def register(self, name: str, entry: str | type[T]) -> None:
        """Make a class, or the one at `package.module.Class`, known as `name`.

        Registering the same again does nothing, so plug-ins may run twice; ValueError for another.
        """
        if self._entries.setdefault(name, entry) != entry:
            raise VLLMValidationError(f"{self._what} {name!r} is already registered")

    def names(self) -> list[str]:
        """The registered names in order."""
        return sorted(self._entries)

    def get(self, name: str) -> type[T]:
        """The class of `name`; `VLLMValidationError` listing the names for an unknown one."""
        entry = self._entries.get(name)
        if entry is None:
            raise VLLMValidationError(
                f"unknown {self._what} {name!r}; available: {', '.join(self.names())}"
            )
        if isinstance(entry, str):
            found = resolve_class(entry)
            if not issubclass(found, self._base):
                raise TypeError(f"{entry} is no {self._base.__name__}")
            entry = self._entries[name] = found
        return entry
