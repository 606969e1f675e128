# SPDX-License-Identifier: Apache-2.0
"""A function captured once on the CPU; each later run is replayed and run eagerly, and compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vllm.compilation.graph_safety.report import Captured
from vllm.compilation.graph_safety.simulator.differences import differences
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.graph_safety.simulator.tensors import (
    Handle,
    handles_in,
    rebuilt,
    same_bytes,
    storage_of,
    tensors_in,
    whole,
)
from vllm.compilation.graph_safety.simulator.trace import (
    NotReplayable,
    Trace,
    restore,
    snapshot,
)
from vllm.compilation.piecewise import Pieces, capture
from vllm.distributed.parallel_state import get_tp_group

Run = Callable[[], Any]


class SimulatedGraph:
    """One segment of a recording; see `vllm.compilation.piecewise.Graph`."""

    #: whether what is captured runs meanwhile, as it does where nothing but a recorder listens
    runs_at_capture = True

    def __init__(self, recorder: Recorder, trace: Trace) -> None:
        self._recorder, self.trace = recorder, trace
        self._index = -1

    def begin(self) -> None:
        self._index = self._recorder.begin_segment()

    def end(self) -> None:
        self._recorder.end_segment()

    def replay(self) -> None:
        self.trace.replay(self._index)


class CheckedRun:
    """`run` captured, its device work undone afterwards: a capture launches nothing.

    What it reads of memory made outside lies at fixed addresses; fill that with a step's values and
    call `step`. `split`: at graph breaks. `recorder` collects the findings. `guarded`: memory by
    name that the captured run may not change (one of padding alone: state). `graph`: what captures
    a segment and replays it.
    """

    def __init__(
        self,
        run: Run,
        recorder: Recorder,
        *,
        split: bool = False,
        guarded: Mapping[str, Tensor] = MappingProxyType({}),
        graph: type[SimulatedGraph] = SimulatedGraph,
    ) -> None:
        self._recorder, self._split = recorder, split
        #: replays, and those that computed something else than their eager run, or nothing
        self.num_steps = self.stale_steps = 0
        #: whether rows of padding write to guarded memory: which of them is last is chance
        self._padding_writes = False
        #: the largest between results of a replay and of its eager run
        self.max_difference: float | None = None
        undone, guards = graph.runs_at_capture, list(guarded.values())
        held = {} if undone else {Handle.of(t).memory: _content(t).clone() for t in guards}
        with filled_memory(), recorder.recording(undone=undone) as trace:
            self._pieces: Pieces
            self._pieces, output = capture(run, lambda: graph(recorder, trace), split=split)
        self.trace = trace
        if guarded and not undone:
            trace.before = snapshot(trace.outside, recorder.frozen, {})
            trace.before |= {memory: held[memory] for memory in held if memory in trace.outside}
            # Nothing has run but breaks, which have written what they write.
            restore(trace.outside, trace.before)
            run()
        for name, tensor in guarded.items():
            self._check_untouched(name, Handle.of(tensor).memory)
        recorder.captures.add(trace.run)
        restore(trace.outside, trace.before)
        trace.before.clear()
        self._output = rebuilt(output, Tensor, Handle.of)

    def _check_untouched(self, name: str, memory: int) -> None:
        """Report the launch that changes guarded memory."""
        trace = self.trace
        if memory not in trace.before:
            return
        held = trace.before[memory]
        guard = whole(trace.outside[memory].open().untyped_storage())
        if same_bytes(guard, held):
            return
        self._padding_writes = True
        restore(trace.outside, trace.before)
        for launch in trace.launches():
            # What the other ranks would add is not what is looked for, and they do not look.
            if launch.is_work and not launch.is_collective:
                launch.replay()
            if not same_bytes(guard, held):
                message = f"{launch.name} writes to {name} in a step of padding"
                self._recorder.report(21, launch.spot, message)
                return
        reader = trace.first_reader(memory)
        assert reader is not None
        message = f"a graph break writes to {name} in a step of padding"
        self._recorder.report(21, reader.spot, message)

    def replay(self) -> Any:
        """Run the recording; its result, which the next replay overwrites."""
        self._pieces.replay()
        return rebuilt(self._output, Handle, Handle.open)

    def step(self, run: Run, rows: int | None = None, unused: Sequence[Tensor] = ()) -> Any:
        """Replay, then `run` on the same memory: launches, results and memory must be equal, bit
        for bit, of results their first `rows` rows (None: all), of memory what is not `unused`.
        Returns what `run` returned; the memory is as it left it, and zero where it is `unused`."""
        trace, recorder = self.trace, self._recorder
        before = snapshot(trace.outside, recorder.frozen, recorder.before)
        failure, replayed = None, []
        try:
            with filled_memory():
                replayed = [_first(rows, t).clone() for t in tensors_in(self.replay())]
        except NotReplayable as error:
            failure = error
            trace.give_up()
        _clear(unused)
        after = snapshot(trace.outside, recorder.frozen, recorder.after)
        restore(trace.outside, before)
        breaks = recorder.breaks() if self._split else nullcontext()
        with filled_memory(), recorder.recording(undone=False) as now, breaks:
            recorder.begin_segment()
            result = run()
        _clear(unused)
        found = differences(trace, now, recorder.origins)
        results = [_first(rows, t) for t in tensors_in(result)]
        others = [failure] if failure is not None else self._other_values(replayed, results, after)
        self.num_steps += 1
        self.stale_steps += bool(others)
        if failure is None:
            self._note_difference(replayed, results)
        # What a rank launches otherwise than it did, or leaves to chance, changes the results of
        # those it shares layers with: theirs are no findings of their own.
        certain = not found and failure is None and not self._padding_writes
        alike = get_tp_group().all_agree(certain)
        if failure is not None:
            found = found or others
        elif alike and not trace.reads and not now.reads:
            found = others
        for one in found:
            recorder.report_once(one.hazard, one.spot, one.message)
        now.owned.clear()
        return result

    def _note_difference(self, replayed: list[Tensor], eager: list[Tensor]) -> None:
        pairs = [(x, y) for x, y in zip(replayed, eager, strict=False) if x.shape == y.shape]
        for x, y in pairs:
            equal = x.numel() == 0 or same_bits(x, y)
            difference = 0.0 if equal else float((x.double() - y.double()).abs().max())
            # What is no number on one side alone is as far away as can be.
            difference = sys.float_info.max if difference != difference else difference
            self.max_difference = max(self.max_difference or 0.0, difference)

    def result(self, name: str) -> Captured:
        """What became of it, for a report."""
        return Captured(name, True, self.num_steps, self.stale_steps, self.max_difference)

    def _other_values(
        self, replayed: list[Tensor], eager: list[Tensor], after: dict[int, Tensor]
    ) -> list[NotReplayable]:
        """Where a replay computed something else."""
        if len(replayed) != len(eager):
            return [self._writer(0, "a replay has other results than an eager run")]
        for handle, x, y in zip(handles_in(self._output), replayed, eager, strict=True):
            if not same_bits(x, y):
                message = "a replay's result differs from an eager run's"
                return [self._writer(handle.memory, message)]
        for memory, content in after.items():
            storage = storage_of(self.trace.outside[memory].storage)
            if storage is not None and not same_bytes(content, whole(storage)):
                return [self._writer(memory, "a replay leaves other memory than an eager run")]
        return []

    def _writer(self, memory: int, message: str) -> NotReplayable:
        """The last launch that had to do with some memory."""
        launches = [launch for launch in self.trace.launches() if launch.is_work]
        for launch in reversed(launches):
            handles = handles_in(launch.args) + handles_in(launch.results)
            if any(handle.memory == memory for handle in handles):
                return NotReplayable(7, launch.spot, f"{message} (last written by {launch.name})")
        return NotReplayable(7, launches[-1].spot, message)


def _content(tensor: Tensor) -> Tensor:
    """All bytes of the storage that a tensor lies in."""
    return whole(tensor.untyped_storage())


@contextmanager
def filled_memory() -> Iterator[None]:
    """Inside the block new memory holds the same in every run, no number where it is not written:
    what rows of padding compute is then the same, too."""
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)


def _clear(unused: Sequence[Tensor]) -> None:
    """What rows of padding compute follows from what was in their memory before."""
    for tensor in unused:
        tensor.zero_()


def _first(rows: int | None, tensor: Tensor) -> Tensor:
    return tensor if rows is None else tensor[:rows]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same bytes; equal numbers of other bits are not the same."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    raw = (t.contiguous().flatten().view(torch.uint8) for t in (x, y))
    return torch.equal(*raw) if x.numel() else True
