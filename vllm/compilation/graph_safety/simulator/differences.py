# SPDX-License-Identifier: Apache-2.0
"""Two runs of one function side by side: what a replay of the first would get wrong in the second.

A replay repeats the launches of the capture: the same ops in the same order, the same numbers from
Python, the same addresses. Each of these that the second run has otherwise is a hazard.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from vllm.compilation.graph_safety.simulator.reads import stores_element
from vllm.compilation.graph_safety.simulator.spots import Spot
from vllm.compilation.graph_safety.simulator.tensors import Handle, handles_in, leaves
from vllm.compilation.graph_safety.simulator.trace import Launch, NotReplayable, Origin, Trace

#: ops whose numbers are bounds of a view
_VIEWS = frozenset({"slice", "narrow", "as_strided", "split", "split_with_sizes", "view", "expand"})

_LEFT = "{} ran at capture only; later runs read what it left"


def differences(captured: Trace, now: Trace, origins: Mapping[int, Origin]) -> list[NotReplayable]:
    """Launches that differ and why; none where a replay of `captured` does what `now` did. Ends
    with the first after which launches cannot be compared: another op, another shape.

    `origins`: of memory that runs made.
    """
    found: list[NotReplayable] = []
    read_in = {spot.code for spot in (*captured.reads, *now.reads)}
    known: set[tuple[int, int]] = set()
    for a, b in zip_longest(captured.launches(), now.launches()):
        if a is None or b is None or a.name != b.name or a.spot != b.spot:
            # After the host has read a value, what it launches may follow from that.
            return found if read_in else [*found, _other_launches(captured, now, a, b)]
        pair = _Pair(captured, now, origins, a, b, known)
        others = list(pair.differences())
        if b.spot.code not in read_in and not (read_in and pair.other_shapes):
            found += others
        if pair.other_shapes:
            break
    return found


def _other_launches(
    captured: Trace, now: Trace, a: Launch | None, b: Launch | None
) -> NotReplayable:
    one = b if b is not None else a
    assert one is not None
    spot = one.spot
    for handle in handles_in(b.args) if b is not None else []:
        if handle.memory in captured.made:
            launch = captured.launch_at(captured.made[handle.memory])
            return NotReplayable(_left_behind(handle), launch.spot, _LEFT.format(launch.name))
    before, after = (
        sum(launch.spot == spot for launch in trace.launches()) for trace in (captured, now)
    )
    if b is None:
        message = f"the capture launched {one.name} here, a later run ends before it"
        return NotReplayable(8, spot, message)
    if before != after and before and after:
        message = f"{one.name} is launched {before} times at capture and {after} times now"
        return NotReplayable(_loop_hazard(spot), spot, message)
    if a is None:
        message = f"a later run launches {one.name} here, where the capture had ended"
        return NotReplayable(8, spot, message)
    message = f"a later run launches {one.name} here, the capture had {a.name} in its place"
    return NotReplayable(5, spot, message)


def _left_behind(handle: Handle) -> int:
    """What a run that reads memory of the capture does: integers are ids."""
    return 26 if handle.dtype.is_floating_point else 20


def _loop_hazard(spot: Spot) -> int:
    for node in spot.surroundings():
        if isinstance(node, ast.While):
            return 11
        if isinstance(node, ast.For):
            return 3
    return 5


@dataclass
class _Pair:
    """The same launch in two runs. `known`: memory that is known to be in another's place."""

    captured: Trace
    now: Trace
    origins: Mapping[int, Origin]
    a: Launch
    b: Launch
    known: set[tuple[int, int]]
    other_shapes: bool = False

    def differences(self) -> Iterator[NotReplayable]:
        before, after = list(leaves(self.a.args)), list(leaves(self.b.args))
        if len(before) != len(after):
            self.other_shapes = True
            yield self._says(5, "takes other arguments than at capture")
            return
        for x, y in zip(before, after, strict=True):
            if isinstance(x, Handle) and isinstance(y, Handle):
                yield from self._memory(x, y)
                self.other_shapes |= x.shape != y.shape
            elif not _same(x, y):
                yield self._number(x, y)
        results = zip(handles_in(self.a.results), handles_in(self.b.results), strict=False)
        for x, y in results:
            if x.shape != y.shape and not self.other_shapes:
                self.other_shapes = True
                if self.a.name not in _VIEWS:
                    yield self._says(2, f"gives {_sizes(x, y)}")

    def _says(self, hazard: int, message: str, spot: Spot | None = None) -> NotReplayable:
        where = self.b.spot if spot is None else spot
        return NotReplayable(hazard, where, f"{self.a.name} {message}")

    def _number(self, x: object, y: object) -> NotReplayable:
        message = f"takes {_shown(y)} from Python, and a replay the {_shown(x)} of the capture"
        if self.a.name in _VIEWS:
            return self._says(9, message)
        return self._says(4 if stores_element(self.b.spot) else 7, message)

    def _memory(self, x: Handle, y: Handle) -> Iterator[NotReplayable]:
        made, makes = self.captured.made.get(x.memory), self.now.made.get(y.memory)
        same = x.memory == y.memory if made is None else made == makes
        if same and (x.offset, *x.layout) == (y.offset, *y.layout):
            return
        if same:
            yield self._says(9 if x.shape != y.shape else 17, f"reads another part: {_sizes(x, y)}")
        elif (x.memory, y.memory) not in self.known:
            self.known.add((x.memory, y.memory))
            yield self._other_memory(x, y)

    def _other_memory(self, x: Handle, y: Handle) -> NotReplayable:
        origin = self.origins.get(y.memory)
        if origin is None and stores_element(self.b.spot):
            return self._says(4, "copies a number from Python")
        if y.memory in self.now.metadata:
            return self._says(22, "reads metadata at another address than at capture")
        if origin is None and x.is_freed:
            return self._says(15, "reads a tensor that was freed after the capture")
        if origin is None:
            return self._says(17, "reads another tensor than at capture")
        made_by = f"reads what {origin.op} made"
        if origin.in_break:
            return self._says(6, f"{made_by} between graphs, at another address", origin.spot)
        if origin.run == self.now.run:
            return self._says(17, f"{made_by} in this run, and read what was there at capture")
        if x.shape != y.shape:
            return self._says(9, f"{made_by} in an earlier run: {_sizes(x, y)}", origin.spot)
        if origin.run == self.captured.run and x.memory in self.captured.made:
            return NotReplayable(_left_behind(y), origin.spot, _LEFT.format(origin.op))
        return self._says(
            17 if origin.is_filled else 26, f"{made_by} in an earlier run", origin.spot
        )


def _same(x: object, y: object) -> bool:
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return np.array_equal(x, y)
    if type(x) is not type(y):
        return False
    if isinstance(x, torch.ScriptObject):
        # A process group, or the like: which of them is no number, and cannot be asked.
        return True
    return bool(x == y) or (isinstance(x, float) and x != x and y != y)


def _sizes(x: Handle, y: Handle) -> str:
    return f"{list(x.shape)} at capture and {list(y.shape)} now"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
