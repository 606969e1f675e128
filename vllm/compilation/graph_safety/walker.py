# SPDX-License-Identifier: Apache-2.0
"""What the parts of the pass ask of each other."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType

from vllm.compilation.graph_safety.values import Value


class Mode(Enum):
    """Where code runs. BUILD: before any step, where everything is allowed."""

    CAPTURED = "inside a graph"
    BREAK = "in an eager break between graphs"
    OP = "in an op's implementation"
    STEP = "in a step, outside graphs"
    BUILD = "when the model is built"


@dataclass(frozen=True, order=True)
class Finding:
    """A hazard at a place; `function` is qualified by its module and class."""

    path: str
    line: int
    column: int
    hazard: int
    message: str
    function: str
    code: str


@dataclass(frozen=True)
class Arguments:
    """Of a call. `rest`: any of more positional ones."""

    positional: tuple[Value, ...] = ()
    named: tuple[tuple[str, Value], ...] = ()
    rest: Value | None = None

    def get(self, name: str) -> Value | None:
        return dict(self.named).get(name)

    def all(self) -> list[Value]:
        more = [] if self.rest is None else [self.rest]
        return [*self.positional, *(v for _, v in self.named), *more]


class Walker(ABC):
    """The pass as a whole: walks functions, each once per kind of arguments."""

    @abstractmethod
    def in_scope(self, module: str) -> bool:
        """Whether functions of a module are walked."""

    @abstractmethod
    def run(
        self, function: FunctionType, receiver: Value | None, args: Arguments, mode: Mode
    ) -> Value:
        """What a call gives; its body is walked."""

    @abstractmethod
    def made(self, cls: type, args: Arguments, mode: Mode) -> Value:
        """A new object."""

    @abstractmethod
    def attributes(self, cls: type) -> Mapping[str, Value]:
        """What a class's methods give `self`, `__init__` first."""

    @abstractmethod
    def has_initially(self, cls: type, name: str) -> bool:
        """Whether objects have an attribute before any step."""


class Body(ABC):
    """The function that is walked."""

    walker: Walker
    mode: Mode
    #: names whose values are known
    variables: dict[str, Value]
    #: what `self` is given
    given: dict[str, Value]
    #: names of what kernels write that may still run
    written: set[str]

    @abstractmethod
    def value(self, node: ast.expr | None) -> Value:
        """What an expression is; its hazards are reported."""

    @abstractmethod
    def told(self, node: ast.expr | None) -> Value:
        """As `value`; it may also tell that a graph is being captured. Nothing keeps that: a name
        may be given something else."""

    @abstractmethod
    def report(self, hazard: int, node: ast.AST, message: str) -> None: ...

    @abstractmethod
    def report_in(
        self, function: FunctionType, hazard: int, node: ast.expr | ast.stmt, message: str
    ) -> None:
        """Of another function, which this one launches."""

    @abstractmethod
    def attribute(self, receiver: Value, name: str) -> Value: ...

    @abstractmethod
    def call_local(self, function: Value, args: Sequence[Value]) -> Value: ...
