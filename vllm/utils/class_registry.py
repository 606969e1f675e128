# SPDX-License-Identifier: Apache-2.0
"""Names for classes that are imported when they are first asked for."""

from __future__ import annotations

from typing import Generic, TypeVar

from vllm.exceptions import VLLMValidationError
from vllm.utils.dotted import resolve_class

T = TypeVar("T")


class ClassRegistry(Generic[T]):
    """Maps names to subclasses of `base`; `what` names the kind in errors."""

    def __init__(self, what: str, base: type[T]) -> None:
        self._what = what
        self._base = base
        self._entries: dict[str, str | type[T]] = {}

    def register(self, name: str, entry: str | type[T]) -> None:
        """Make a class, or the one at `package.module.Class`, known as `name`.

        Registering the same again does nothing, so plug-ins may run twice; ValueError for another.
        """
        if self._entries.setdefault(name, entry) != entry:
            raise ValueError(f"{self._what} {name!r} is already registered")

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
