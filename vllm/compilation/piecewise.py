# SPDX-License-Identifier: Apache-2.0
"""One capture split at graph breaks; a replay is a list of graphs and callables in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from vllm.compilation.graph_break import set_recorder
from vllm.compilation.monitor import capturing

R = TypeVar("R")


class _DeviceBytes:
    """A byte range as the CUDA array interface (version 3) describes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def alias_memory(tensor: Tensor) -> Tensor:
    """The same elements at the same address, with the same strides; owns nothing.

    What a graph computes lies in its memory pool at a fixed address for as long as the graph
    lives. Holding on to such a tensor would keep later captures from reusing its bytes; an alias
    does not. The caller sees to it that the memory outlives it.
    """
    if tensor.numel() == 0 or not tensor.is_cuda:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    source = _DeviceBytes(tensor.data_ptr(), extent * tensor.element_size())
    raw = torch.as_tensor(source, device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Graph(Protocol):
    """A recording of launches; `DeviceGraph` is one."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class DeviceGraph:
    """A CUDA graph recorded from, and replayed on, the current stream.

    `pool` (`torch.cuda.graph_pool_handle()`) is what it allocates from; graphs that never run at
    once share one. Other threads may use the device meanwhile: only this thread's calls can break a
    capture.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        # What was uploaded for this capture is overwritten by the preparation of the next one.
        torch.cuda.current_stream().synchronize()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class Pieces:
    """What `capture` recorded."""

    def __init__(self, pieces: list[Callable[[], None]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def replay(self) -> None:
        """Launch everything on the current stream, in the forward context that is set."""
        for piece in self._pieces:
            piece()


class _Recorder:
    """The pieces of a capture that is going on."""

    def __init__(self, new_graph: Callable[[], Graph], alias: Callable[[Tensor], Tensor]) -> None:
        self._new_graph = new_graph
        self._alias = alias
        self._open = ExitStack()
        self.pieces: list[Callable[[], None]] = []

    def begin(self) -> None:
        graph = self._new_graph()
        with ExitStack() as stack:
            stack.enter_context(capturing())
            graph.begin()
            stack.callback(graph.end)
            self._open = stack.pop_all()
        self.pieces.append(graph.replay)

    def end(self) -> None:
        """Does nothing between graphs, so that a failed capture can always be ended."""
        self._open.close()

    def run_between(self, call: Callable[..., None], *args: object, **kwargs: object) -> None:
        self.end()
        # Aliases: the arguments' memory is the graphs' to reuse once their last reader has run.
        piece = partial(
            call,
            *(self._unowned(arg) for arg in args),
            **{name: self._unowned(arg) for name, arg in kwargs.items()},
        )
        set_recorder(None)
        try:
            result: Any = piece()
        finally:
            set_recorder(self)
        if result is not None:
            raise RuntimeError(
                f"graph break {call.__qualname__} returned a value, which no graph could read; "
                "let it fill a tensor it is given"
            )
        self.pieces.append(piece)
        self.begin()

    def _unowned(self, value: object) -> object:
        return self._alias(value) if isinstance(value, Tensor) else value


def capture(
    run: Callable[[], R],
    new_graph: Callable[[], Graph],
    *,
    split: bool,
    alias: Callable[[Tensor], Tensor] = alias_memory,
) -> tuple[Pieces, R]:
    """Record `run()`; returns the pieces and its result, whose tensors each replay overwrites.

    With `split`, breaks run once, between the graphs; else they are recorded like everything else,
    in one graph. What a graph holds is recorded and not run. Keep only aliases (`alias_memory`) of
    the result's tensors, and nothing else of the run: its memory is the next capture's.
    """
    recorder = _Recorder(new_graph, alias)
    recorder.begin()
    previous = set_recorder(recorder if split else None)
    try:
        result = run()
    except BaseException:
        # Ending a capture that has failed fails, too; what failed first says why.
        with suppress(RuntimeError):
            recorder.end()
        raise
    finally:
        set_recorder(previous)
    recorder.end()
    return Pieces(recorder.pieces), result
