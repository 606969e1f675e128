# SPDX-License-Identifier: Apache-2.0
"""How an op finds its implementations on a platform.

An op is declared once, by its reference in plain torch, whose signature and docstring are the
contract. Implementations live beside it, in modules of the same package, under the op's name: a
function that takes all arguments, or an `Implementation` that takes some.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

from vllm.kernels.cuda_library import CudaOps

P = ParamSpec("P")
R = TypeVar("R")

#: modules, in order of preference
Modules = tuple[str, ...]


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """One way to compute an op.

    `takes` says for which arguments, None: for all. `needs`: compiled ops that it is made of.
    """

    run: Callable[P, R]
    takes: Callable[P, bool] | None = None
    needs: CudaOps | None = None


class Registry:
    """Base of a class whose attributes are ops: resolves them for one platform.

    `capability`: the GPU's compute capability; None leaves out everything that needs one.
    """

    platform: ClassVar[str]

    def __init__(self, capability: tuple[int, int] | None = None) -> None:
        self.capability = capability
        self._found: dict[CudaOps, bool] = {}
        for op in self.ops():
            vars(self)[op.name] = op.resolve(self)

    @contextmanager
    def launched_through(self, launch: Callable[..., Any]) -> Iterator[None]:
        """Inside the block ops are called by `launch(name, run, *args, **kwargs)`, where `run`
        computes the op."""
        before = {op.name: vars(self)[op.name] for op in self.ops()}
        vars(self).update({name: partial(launch, name, run) for name, run in before.items()})
        try:
            yield
        finally:
            vars(self).update(before)

    @classmethod
    def ops(cls) -> Iterator[Op[Any, Any]]:
        """The ops that no subclass defines as a method of its own."""
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        found = (getattr(cls, name) for name in names)
        return (op for op in found if isinstance(op, Op))

    def has(self, ops: CudaOps) -> bool:
        """Whether compiled ops run on this GPU; asked, and the choice recorded, once."""
        if ops not in self._found:
            self._found[ops] = self.capability is not None and ops.choose(self.capability)
        return self._found[ops]


class Op(Generic[P, R]):
    """An op of a `Registry`; on an instance, the function that computes it there.

    `cpu` and `cuda` name the modules beside `reference` that implement it on these platforms.
    """

    name: str

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        cpu: Modules = ("cpu",),
        cuda: Modules = ("triton",),
    ) -> None:
        self.reference = reference
        self.package = reference.__module__.rpartition(".")[0]
        self._modules = {"naive": (), "cpu": cpu, "cuda": cuda}

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, kernels: None, owner: type) -> Op[P, R]: ...
    @overload
    def __get__(self, kernels: Registry, owner: type) -> Callable[P, R]: ...
    def __get__(self, kernels: Registry | None, owner: type) -> Op[P, R] | Callable[P, R]:
        return self if kernels is None else self.resolve(kernels)

    def implementations(self, platform: str) -> list[Implementation[P, R]]:
        """Those of a platform, in order of preference. Imports their modules."""
        found = []
        for name in self._modules[platform]:
            found_there = self._found_in(f"{self.package}.{name}", platform)
            if not isinstance(found_there, Implementation):
                found_there = Implementation(found_there)
            found.append(found_there)
        return found

    def _found_in(self, module: str, platform: str) -> Any:
        missing = "does not exist"
        if importlib.util.find_spec(module) is not None:
            implementations = vars(importlib.import_module(module))
            if self.name in implementations:
                return implementations[self.name]
            missing = f"has no {self.name}"
        raise ImportError(
            f"op {self.name!r} names {module} for {platform}, which {missing}: write it, or name "
            f"others, such as {platform}=('naive',) for the reference"
        )

    def resolve(self, kernels: Registry) -> Callable[P, R]:
        """What computes the op: the first implementation that takes the arguments."""
        run = self.last_resort(kernels)
        for implementation in reversed(self.implementations(kernels.platform)):
            if implementation.needs is None or kernels.has(implementation.needs):
                run = _prefer(implementation, run)
        return run

    def last_resort(self, kernels: Registry) -> Callable[P, R]:
        """What computes the op where no implementation takes the arguments."""
        if kernels.platform == "naive":
            return self.reference

        def refuse(*args: P.args, **kwargs: P.kwargs) -> R:
            raise ValueError(f"no kernel of platform {kernels.platform!r} takes this {self.name}")

        return refuse


class ComposedOp(Op[P, R]):
    """An op that is made of others where no implementation fuses them."""

    def __init__(
        self, composition: Callable[Concatenate[Any, P], R], package: str, cuda: Modules
    ) -> None:
        self.composition = composition
        self.package = package
        self._modules = {"naive": (), "cpu": (), "cuda": cuda}

    def last_resort(self, kernels: Registry) -> Callable[P, R]:
        return partial(self.composition, kernels)


def composed(
    package: str, *, cuda: Modules = ()
) -> Callable[[Callable[Concatenate[Any, P], R]], ComposedOp[P, R]]:
    """Make a method of a `Registry` a `ComposedOp`; `cuda`: modules of `package` that fuse it."""
    return partial(ComposedOp, package=f"vllm.kernels.{package}", cuda=cuda)


def _prefer(implementation: Implementation[P, R], other: Callable[P, R]) -> Callable[P, R]:
    takes, run = implementation.takes, implementation.run
    if takes is None:
        return run

    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        if takes(*args, **kwargs):
            return run(*args, **kwargs)
        return other(*args, **kwargs)

    return choose
