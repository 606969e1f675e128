# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without the work that it repeats or throws away: half of its time.

It computes the same. Nothing here is needed for a test to pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def make_quicker() -> None:
    """For the rest of this process."""
    from triton.runtime import interpreter

    if isinstance(interpreter._patch_lang, _OncePerLaunch):
        return
    interpreter._patch_lang = _OncePerLaunch(interpreter._patch_lang, interpreter.tl)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    # It computes whether each sum and product of integers overflows, for an assertion that is made
    # in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's type for one of Triton's; the interpreter makes a table of all types each time."""
    known: dict[str, Any] = {}

    def find(triton_type: Any) -> Any:
        found = known.get(triton_type.name)
        if found is None:
            found = known[triton_type.name] = dtype_of(triton_type)
        return found

    return find


class _OncePerLaunch:
    """The interpreter's `_patch_lang`, which looks through all of `triton.language` for what it
    must replace in order to interpret a function; `restore` undoes that after a launch.

    It is also called for each call of a device function, thousands in a launch, when the launch has
    replaced everything.
    """

    def __init__(self, replace_for: Callable[[Any], Any], language: Any) -> None:
        self._replace_for = replace_for
        #: each a module of its own, which a function's file may have imported
        self._modules = (language, language.core)
        self._replaced: set[int] = set()
        self._launch: Any = None
        self._used_by = functools.cache(self._used)

    def __call__(self, function: Any) -> _OncePerLaunch:
        used = self._used_by(function)
        if self._launch is None:
            self._launch = self._replace_for(function)
            self._replaced = set(used)
        elif not used <= self._replaced:
            self._replace_for(function)
            self._replaced |= used
        return self

    def _used(self, function: Any) -> frozenset[int]:
        found = {id(value) for value in function.__globals__.values()}
        return frozenset(found & {id(module) for module in self._modules})

    def restore(self) -> None:
        self._launch.restore()
        self._launch = None
