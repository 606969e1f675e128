# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel again without working out again what it is compiled for.

Triton's own launch classifies every argument, writes the classes and the options as text and looks
the text up, which for a kernel of twenty arguments takes longer than many a kernel runs. Between
the graphs of a step with prefills that is most of the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

Grid = tuple[int, ...]

_INT32 = 2**31
_ALIGNMENT = 16
#: the innermost block of `noting` that is open
_block: object | None = None


@contextmanager
def noting() -> Iterator[None]:
    """Inside the block launches of kernels that are not compiled are noted by a hook of Triton's.
    Launchers ask it once for each variant, in every block anew."""
    global _block
    outer, _block = _block, object()
    try:
        yield
    finally:
        _block = outer


@dataclass(frozen=True)
class _Compiled:
    """A compiled kernel and the values of all its constants, in the order of its parameters."""

    kernel: Any
    constants: tuple[Any, ...]


@dataclass(frozen=True)
class _CallForm:
    """Calls whose arguments have the same types and whose constants have the same names.

    `compiled` is found by what Triton compiles for, taken finely: tensors by dtype and whether all
    of them are aligned, else each, scalars by value unless the kernel is not specialised for them,
    and then by whether they fit 32 bits.
    """

    tensors: list[int]
    integers: list[int]
    valued: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    compiled: dict[tuple[Hashable, ...], _Compiled] = field(default_factory=dict)
    #: what was noted last in which block of `noting`
    noted: dict[tuple[Hashable, ...], object] = field(default_factory=dict)

    @classmethod
    def of(cls, args: tuple[Any, ...], unspecialized: set[int]) -> _CallForm:
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        rest = sorted(set(range(len(args))) - set(tensors))
        integers = [i for i in rest if i in unspecialized and isinstance(args[i], int)]
        valued = [i for i in rest if i not in unspecialized]
        return cls(tensors, integers, _getter(valued))


def _getter(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What lies at `places`; the last one twice, as one place alone would not give a tuple."""
    return itemgetter(*places, places[-1]) if places else lambda args: ()


class Launcher:
    """`launcher[grid](*arguments, **constants)` does what `kernel[grid](...)` does, sooner.

    Arguments are positional: tensors, numbers or None, as in the kernel's signature up to its first
    constant. A variant's first launch is Triton's own; later ones do not check that tensors are on
    the device. In the interpreter every launch is Triton's.

    Raises:
        ValueError: constants come before other parameters, or alignment alone is exempt from
            specialisation.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._forms: dict[tuple[Hashable, ...], _CallForm] = {}
        self._interpreted = not isinstance(kernel, JITFunction)
        if self._interpreted:
            return
        constant = [param.is_constexpr for param in kernel.params]
        if constant != sorted(constant):
            raise ValueError(f"{kernel.__name__}: constants must be its last parameters")
        if any(param.do_not_specialize_on_alignment for param in kernel.params):
            raise ValueError(f"{kernel.__name__}: specialised, but not on alignment")
        self._constants = [param.name for param in kernel.params if param.is_constexpr]
        self._unspecialized = {param.num for param in kernel.params if param.do_not_specialize}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        if self._interpreted:
            return self.kernel[grid]

        def launch_again(*args: Any, **constants: Any) -> None:
            self._launch((*grid, 1, 1)[:3], args, constants)

        return launch_again

    def _launch(self, grid: Grid, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        called = (*map(type, args), *constants)
        form = self._forms.get(called)
        if form is None:
            form = self._forms[called] = _CallForm.of(args, self._unspecialized)
        device = driver.active.get_current_device()
        key: list[Hashable] = [device, *constants.values(), *form.valued(args)]
        for i in form.integers:
            key.append(-_INT32 <= args[i] < _INT32)
        values = list(args)
        bits = 0
        for i in form.tensors:
            tensor = values[i]
            key.append(tensor.dtype)
            values[i] = address = tensor.data_ptr()
            bits |= address
        if bits % _ALIGNMENT:
            key += [values[i] % _ALIGNMENT == 0 for i in form.tensors]
        variant = tuple(key)
        found = form.compiled.get(variant)
        if found is not None:
            stream = driver.active.get_current_stream(device)
            found.kernel[grid](*values, *found.constants, stream=stream)
            return
        if _block is not None and form.noted.get(variant) is _block:
            return
        kernel = self.kernel[grid](*args, **constants)
        if kernel is not None:
            ordered = tuple(constants[name] for name in self._constants)
            form.compiled[variant] = _Compiled(kernel, ordered)
        elif _block is not None:
            form.noted[variant] = _block
