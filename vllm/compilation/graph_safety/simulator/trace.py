# SPDX-License-Identifier: Apache-2.0
"""What a recording holds: launches in order, the memory they use, and where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vllm.compilation.graph_safety.simulator.spots import Spot
from vllm.compilation.graph_safety.simulator.tensors import (
    Handle,
    handles_in,
    leaves,
    rebuilt,
    storage_of,
    tensors_in,
    whole,
)
from vllm.kernels.all_reduce.cuda import COLLECTIVES as PEER_COLLECTIVES


class NotReplayable(Exception):
    """A replay would not do what the launch did; `spot`: of the launch."""

    def __init__(self, hazard: int, spot: Spot, message: str) -> None:
        super().__init__(message)
        self.hazard, self.spot, self.message = hazard, spot, message


@dataclass
class Launch:
    """One op with its arguments, tensors as handles, and its results.

    `is_work`: whether a device would run anything; views and uninitialised memory do not.
    `is_collective`: whether other ranks take part.
    """

    name: str
    run: Callable[..., Any]
    args: Any
    results: Any
    spot: Spot
    is_work: bool
    is_collective: bool = False

    def keep_pace(self) -> None:
        """Take part in a collective of the other ranks, with numbers that mean nothing."""
        args, kwargs = rebuilt(self.args, Handle, Handle.empty)
        self.run(*args, **kwargs)

    def replay(self) -> None:
        """Run it on the memory of its capture. NotReplayable if that is not possible."""
        for handle in handles_in(self.args):
            if handle.is_freed:
                message = f"{self.name} reads a tensor that was freed after the capture"
                raise NotReplayable(15, self.spot, message)
        args, kwargs = rebuilt(self.args, Handle, Handle.open)
        found = tensors_in(self.run(*args, **kwargs))
        for result, kept in zip(found, handles_in(self.results), strict=True):
            target = kept.open()
            if result.data_ptr() == target.data_ptr() and result.shape == target.shape:
                continue
            if result.shape != target.shape:
                message = (
                    f"{self.name} gave {list(target.shape)} at capture and "
                    f"{list(result.shape)} in a replay"
                )
                raise NotReplayable(2, self.spot, message)
            target.copy_(result)


def is_collective(op: Any) -> bool:
    """Whether the other ranks wait for this one to call an op of the dispatcher."""
    name = op.overloadpacket.__name__
    return op.namespace == "c10d" or (op.namespace == "vllm_cuda" and name in PEER_COLLECTIVES)


def as_launched(op: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a launch runs, and the arguments that another run has to give alike. The last one of an
    op may say that its launch begins before the one ahead of it ends, which changes no result and
    is so in captures alone."""
    if op.namespace == "c10d":
        return partial(_completed, op), args
    names = [argument.name for argument in op._schema.arguments]
    if op.namespace == "aten" or names[-1:] != ["overlap"] or len(args) < len(names):
        return op, args
    *others, overlap = args
    return lambda *given: op(*given, overlap), tuple(others)


def _completed(collective: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective, an op of torch's, to its end; on a GPU, for what this stream is given
    next."""
    result = collective(*args, **kwargs)
    for one in leaves(result):
        if isinstance(one, torch.ScriptObject):
            dist.Work.unbox(one).wait()
    return result


@dataclass(frozen=True)
class Origin:
    """Where memory came from: the run that made it (0: the capture), its launch in that run, and
    the op. `in_break`: made between graphs."""

    storage: StorageWeakRef
    run: int
    place: tuple[int, int]
    op: str
    spot: Spot
    is_filled: bool
    in_break: bool


@dataclass
class Trace:
    """A recording: segments of launches, with breaks between them.

    `owned`: the memory that the launches made. `outside`: the other memory they use, by its name,
    and the launch that used it first. `before`: what that held when it was first used.
    """

    run: int
    segments: list[list[Launch]] = field(default_factory=list)
    owned: list[torch.UntypedStorage] = field(default_factory=list)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)
    outside: dict[int, Handle] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    #: of `outside`, what the metadata of a forward context holds
    metadata: set[int] = field(default_factory=set)
    #: where the host read a device value
    reads: list[Spot] = field(default_factory=list)
    #: the launch that runs in a replay
    at: tuple[int, int] = (0, 0)

    def launch_at(self, place: tuple[int, int]) -> Launch:
        segment, index = place
        return self.segments[segment][index]

    def first_reader(self, memory: int) -> Launch | None:
        """The first launch that is given some memory."""
        for launch in self.launches():
            if any(handle.memory == memory for handle in handles_in(launch.args)):
                return launch
        return None

    def launches(self) -> Iterator[Launch]:
        for segment in self.segments:
            yield from segment

    def replay(self, index: int) -> None:
        """Run one segment. NotReplayable as `Launch.replay`."""
        for number, launch in enumerate(self.segments[index]):
            self.at = (index, number)
            if launch.is_work:
                launch.replay()

    def give_up(self) -> None:
        """A replay has ended in the middle; other ranks go on, and wait for this one's part."""
        segment, number = self.at
        rest = [*self.segments[segment][number:], *chain(*self.segments[segment + 1 :])]
        for launch in rest:
            if launch.is_collective:
                launch.keep_pace()


def snapshot(
    handles: dict[int, Handle], kept: set[int], reused: dict[int, Tensor]
) -> dict[int, Tensor]:
    """The bytes of the memory of `handles`, without those that are `kept` as they are. `reused`:
    what an earlier snapshot left, which is overwritten, and added to."""
    found = {}
    for memory, handle in handles.items():
        storage = None if memory in kept else storage_of(handle.storage)
        if storage is None:
            continue
        content, before = whole(storage), reused.get(memory)
        if before is not None and before.shape == content.shape:
            found[memory] = before.copy_(content)
        else:
            found[memory] = reused[memory] = content.clone()
    return found


def restore(handles: dict[int, Handle], saved: dict[int, Tensor]) -> None:
    """Write back what `snapshot` took."""
    for memory, content in saved.items():
        storage = storage_of(handles[memory].storage)
        if storage is not None:
            # An op may have resized it, which is reported where it happens.
            whole(storage)[: len(content)].copy_(content[: storage.nbytes()])
