# SPDX-License-Identifier: Apache-2.0
"""Who owns each tensor that a graph reads, and whether it stays where it was: tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import FunctionType

from torch import Tensor

from vllm.compilation.graph_safety.simulator.tensors import Handle
from vllm.compilation.graph_safety.simulator.trace import NotReplayable, Trace

#: configuration, which holds no tensor that a step reads; graphs, which own none
_LEFT_OUT = ("vllm.config.", "vllm.compilation.")


def named_tensors(roots: Mapping[str, object]) -> dict[str, Handle]:
    """Where the tensors lie that objects hold, by a path of attributes, keys and indices."""
    found: dict[str, Handle] = {}
    seen: set[int] = set()
    waiting = list(roots.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Tensor):
            found[name] = Handle.of(value)
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += _parts(name, value)
    return found


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, type | FunctionType):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f"{name}.{field.name}", getattr(value, field.name)
    elif not type(value).__module__.startswith(_LEFT_OUT) and "__dict__" in dir(value):
        for key, part in vars(value).items():
            # A module's parameters, buffers and children lie in dicts of these names.
            path = name if key in ("_parameters", "_buffers", "_modules") else f"{name}.{key}"
            yield path, part


class FrozenAddresses:
    """`traces`: captures; `roots`: what holds the tensors that they read, by name."""

    def __init__(self, traces: list[Trace], roots: Mapping[str, object]) -> None:
        self._traces, self._roots = traces, roots
        self._read = {memory for trace in traces for memory in trace.outside}
        named = named_tensors(roots)
        self._before = {name: h for name, h in named.items() if h.memory in self._read}

    @property
    def names(self) -> list[str]:
        """Of the tensors that graphs read."""
        return sorted(self._before)

    def without_owner(self) -> list[NotReplayable]:
        """Memory that a graph reads and nothing holds by a name: it may be freed."""
        owned = {handle.memory for handle in self._before.values()}
        found = []
        for trace in self._traces:
            for memory, handle in trace.outside.items():
                if memory in owned:
                    continue
                shape = list(handle.shape)
                if memory in trace.metadata:
                    message = f"reads metadata of shape {shape} that was made for the capture"
                    found.append(self._reader(memory, 22, message))
                else:
                    message = f"reads memory of shape {shape} that nothing named holds"
                    found.append(self._reader(memory, 15, message))
        return found

    def moved(self) -> list[NotReplayable]:
        """Tensors that are not where the captures found them."""
        now = named_tensors(self._roots)
        found = []
        for name, before in self._before.items():
            after = now.get(name)
            if after is None:
                found.append(self._reader(before.memory, 17, f"reads {name}, which is gone"))
            elif (after.memory, after.offset, after.layout) != (
                before.memory,
                before.offset,
                before.layout,
            ):
                found.append(self._reader(before.memory, 17, f"reads {name}, which was replaced"))
        return found

    def _reader(self, memory: int, hazard: int, message: str) -> NotReplayable:
        """The first launch that reads some memory."""
        for trace in self._traces:
            launch = trace.first_reader(memory)
            if launch is not None:
                return NotReplayable(hazard, launch.spot, f"{launch.name} {message}")
        raise KeyError(memory)
