# SPDX-License-Identifier: Apache-2.0
"""Records what a device would launch, and names what a capture would not survive.

Two modes of torch see every op: one on its way in, for what never reaches the dispatcher (`tolist`,
`numpy`), one at the dispatcher. An op of the `Kernels` registry is one launch, whatever it does
inside on this platform: its implementation may read lengths on a CPU, as a kernel does on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.compilation.graph_break import set_recorder
from vllm.compilation.graph_safety.simulator.host_calls import HostCalls
from vllm.compilation.graph_safety.simulator.reads import read_hazard
from vllm.compilation.graph_safety.simulator.spots import Spot, here
from vllm.compilation.graph_safety.simulator.tensors import (
    Handle,
    rebuilt,
    tensors_in,
    whole,
)
from vllm.compilation.graph_safety.simulator.trace import (
    Launch,
    Origin,
    Trace,
    as_launched,
    is_collective,
)
from vllm.compilation.graph_safety.walker import Finding
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
)
from vllm.platforms import current_platform

#: reads of the host that reach no dispatcher on a CPU
_READS = {
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.cpu: "cpu()",
    torch.Tensor.__array__: "a conversion to numpy",
    torch.Tensor.__repr__: "printing a tensor",
}
#: ops that give a number to the host and that have no tag which says so
_NUMBERS = frozenset({"item", "is_nonzero"})
#: make tensors of Python's memory
_FROM_HOST = {
    torch.tensor: "torch.tensor()",
    torch.as_tensor: "torch.as_tensor()",
    torch.asarray: "torch.asarray()",
}
#: ops that make memory and leave in it what was there
UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_FILLED = frozenset(
    {"zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros"}
    | {"new_ones", "new_full", "clone", "eye", "linspace"}
)
#: what converts a tensor to another dtype
_CONVERSIONS = frozenset({"_to_copy", "to"})


class Recorder:
    """Records runs of one function. `frozen`: names of memory that no launch writes (weights)."""

    def __init__(self, frozen: set[int]) -> None:
        self.frozen = frozen
        self.findings: dict[Finding, None] = {}
        self.host_calls = HostCalls(self.report)
        #: of all memory made in any run
        self.origins: dict[int, Origin] = {}
        #: numbers of the runs that are kept for replays
        self.captures: set[int] = set()
        #: memory before and after a replay; large, and used again by the next
        self.before: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        self._runs = 0
        self._trace = Trace(0)
        self._undone = False
        self._depth = 0
        self._in_break = False
        self._context: ForwardContext | None = None
        self._in_metadata: set[int] = set()

    def report(self, hazard: int, spot: Spot, message: str) -> None:
        self.findings.setdefault(spot.finding(hazard, message))

    def report_once(self, hazard: int, spot: Spot, message: str) -> None:
        """Report what follows from a hazard, unless one is known on the same line."""
        found = spot.finding(hazard, message)
        if not any((f.path, f.line) == (found.path, found.line) for f in self.findings):
            self.findings[found] = None

    def report_instead(self, of: int, hazard: int, spot: Spot, message: str) -> None:
        """Report what findings of item `of` on the same line follow from."""
        found = spot.finding(hazard, message)
        place = (found.path, found.line, of)
        same = [f for f in self.findings if (f.path, f.line, f.hazard) == place]
        for one in same:
            del self.findings[one]
        self.report_once(hazard, spot, message)

    def check_after(self) -> None:
        """Report what only shows after the last run: memory that a run made and that two runs later
        is still held, names that changed where they come from."""
        if self._held():
            # What holds it may be garbage.
            gc.collect()
        for origin in self._held():
            message = f"what {origin.op} makes is still held two runs later"
            self.report_once(9, origin.spot, message)
        self.findings |= dict.fromkeys(self.host_calls.stale_imports())

    def _held(self) -> list[Origin]:
        """Where memory came from that runs before the last two made and that is still held; that of
        captures is theirs. Forgets what is not."""
        last = self._runs - 1
        old = [o for o in self.origins.values() if o.run < last - 1 and o.run not in self.captures]
        for origin in old:
            if origin.storage.expired():
                del self.origins[origin.storage.cdata]
        return [origin for origin in old if not origin.storage.expired()]

    @contextmanager
    def recording(self, *, undone: bool) -> Iterator[Trace]:
        """Record what runs inside the block, in segments, as one more run. `undone`: keep what
        memory held before."""
        self._trace = trace = Trace(self._runs)
        self._undone = undone
        self._runs += 1
        with ExitStack() as stack:
            stack.enter_context(current_platform.kernels.launched_through(self._kernel))
            stack.enter_context(_Calls(self))
            stack.enter_context(_Ops(self))
            stack.callback(self.end_segment)
            stack.enter_context(self.watched())
            yield trace

    def watched(self) -> AbstractContextManager[None]:
        """Inside the block what the host calls is seen."""
        return self.host_calls.watched()

    @contextmanager
    def breaks(self) -> Iterator[None]:
        """Inside the block a graph break is one, as in a capture that is split."""
        before = set_recorder(self)
        try:
            yield
        finally:
            set_recorder(before)

    def run_between(self, call: Callable[..., None], *args: object, **kwargs: object) -> None:
        """See `BreakRecorder`."""
        before = set_recorder(None)
        self.end_segment()
        try:
            call(*args, **kwargs)
        finally:
            self.begin_segment()
            set_recorder(before)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside the block ops are the machinery's."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def begin_segment(self) -> int:
        """From here on launches are recorded; the number of the segment."""
        self._in_break = False
        self._trace.segments.append([])
        return len(self._trace.segments) - 1

    def end_segment(self) -> None:
        """From here on launches are a break's."""
        self._in_break = True

    # ---- what the modes see --------------------------------------------------------------------

    def _kernel(self, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return run(*args, **kwargs)
        with _uncalled():
            self._check_strides(name, args)
        return self._launch(name, run, args, kwargs, mutates=True)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of torch's functions."""
        if not self._depth:
            if function in _READS:
                self._read(f"{_READS[function]} gives a device value to the host", args)
            elif function is torch.Tensor.to and args[1:2] == ("cpu",):
                self._read("to('cpu') gives a device value to the host", args)
            elif function in _FROM_HOST and not tensors_in(args):
                message = f"{_FROM_HOST[function]} copies from Python's memory in every run"
                self._suspect(7, here(), message)
        return function(*args, **kwargs)

    def op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op of the dispatcher."""
        if self._depth:
            return op(*args, **kwargs)
        name = op.overloadpacket.__name__
        if torch.Tag.data_dependent_output in op.tags or name in _NUMBERS:
            self._read(f"{name} gives a device value to the host", args)
            return op(*args, **kwargs)
        if torch.Tag.dynamic_output_shape in op.tags and _depends_on_data(name, args):
            self._suspect(2, here(), f"the shape of {name}'s result depends on data")
        if op.namespace not in ("aten", "c10d"):
            self._check_strides(name, args)
        mutates = op._schema.is_mutable or op.namespace == "c10d"
        run, args = as_launched(op, args)
        return self._launch(name, run, args, kwargs, mutates, is_collective(op))

    # ---- recording -----------------------------------------------------------------------------

    def _launch(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mutates: bool,
        is_collective: bool = False,
    ) -> Any:
        spot, given = here(), (args, kwargs)
        self._depth += 1
        try:
            with _uncalled():
                inputs = tensors_in(given)
                handles = [Handle.of(tensor) for tensor in inputs]
                frozen_args = _with_handles(given, handles)
                if not self._in_break:
                    self._note_outside(handles)
            result = run(*args, **kwargs)
            with _uncalled():
                self._check_sizes(name, spot, inputs, handles)
                outputs = tensors_in(result)
                results = [Handle.of(tensor) for tensor in outputs]
                known = {handle.memory for handle in handles}
                pairs = zip(outputs, results, strict=True)
                fresh = [(tensor, handle) for tensor, handle in pairs if handle.memory not in known]
                self._note_made(name, spot, fresh)
                if name in _CONVERSIONS and fresh and inputs[0].dtype != fresh[0][0].dtype:
                    self._check_conversion(spot, handles[0], fresh[0][0])
                if self._in_break:
                    if fresh and name in _FILLED | UNFILLED:
                        self.report(6, spot, f"{name} allocates between graphs")
                    return result
                is_work = mutates or (bool(fresh) and name not in UNFILLED)
                kept = _with_handles(result, results)
        finally:
            self._depth -= 1
        launch = Launch(name, run, frozen_args, kept, spot, is_work, is_collective)
        self._trace.segments[-1].append(launch)
        return result

    def _note_outside(self, handles: list[Handle]) -> None:
        """Remember memory that the run did not make, and what it holds before."""
        trace = self._trace
        for handle in handles:
            memory = handle.memory
            if memory in trace.made or memory in trace.outside:
                continue
            trace.outside[memory] = handle
            if memory in self._memory_of_metadata():
                trace.metadata.add(memory)
            if self._undone and memory not in self.frozen:
                trace.before[memory] = whole(handle.open().untyped_storage()).clone()

    def _memory_of_metadata(self) -> set[int]:
        """What the metadata of the forward context holds, if there is one."""
        if not is_forward_context_available():
            return set()
        context = get_forward_context()
        if context is not self._context:
            self._context = context
            tensors = tensors_in(list(context.attn_metadata.values()))
            self._in_metadata = {Handle.of(tensor).memory for tensor in tensors}
        return self._in_metadata

    def _note_made(self, name: str, spot: Spot, fresh: list[tuple[Tensor, Handle]]) -> None:
        trace = self._trace
        place = (len(trace.segments) - 1, len(trace.segments[-1]))
        for tensor, handle in fresh:
            if not self._in_break:
                trace.made[handle.memory] = place
                trace.owned.append(tensor.untyped_storage())
            self.origins[handle.memory] = Origin(
                handle.storage,
                trace.run,
                place,
                name,
                spot,
                is_filled=name in _FILLED | UNFILLED,
                in_break=self._in_break,
            )

    # ---- checks of one launch ------------------------------------------------------------------

    def _read(self, message: str, args: tuple[Any, ...]) -> None:
        producer = next(
            (
                self.origins[h.memory].op
                for h in map(Handle.of, tensors_in(args[:1]))
                if h.memory in self.origins
            ),
            "",
        )
        spot = here()
        self._suspect(read_hazard(spot, producer), spot, message, is_read=True)

    def _suspect(self, hazard: int, spot: Spot, message: str, *, is_read: bool = False) -> None:
        """A call that waits on a device: nothing waits on a CPU, so that its name must do."""
        if is_read:
            self._trace.reads.append(spot)
        self.report(hazard, spot, message)

    def _check_strides(self, name: str, args: tuple[Any, ...]) -> None:
        for tensor in tensors_in(args):
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in sides):
                self.report(18, here(), f"{name} is given a view with stride 0")

    def _check_sizes(
        self, name: str, spot: Spot, inputs: list[Tensor], before: list[Handle]
    ) -> None:
        for tensor, handle in zip(inputs, before, strict=True):
            if tuple(tensor.shape) != handle.shape:
                sizes = f"{list(handle.shape)}, {list(tensor.shape)} are written to it"
                self.report(16, spot, f"{name} is given a buffer of {sizes}")

    def _check_conversion(self, spot: Spot, source: Handle, result: Tensor) -> None:
        if source.memory in self.frozen:
            dtypes = f"{source.dtype} to {result.dtype}"
            self.report(19, spot, f"a weight is converted from {dtypes} in every run")


def _depends_on_data(name: str, args: tuple[Any, ...]) -> bool:
    """Of an op whose result's shape may depend on data: whether it does, given its arguments."""
    if name != "index":
        return True
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _with_handles(value: object, handles: list[Handle]) -> Any:
    """`value` with the handles of its tensors, which `tensors_in` gave, in their place."""
    taken = iter(handles)
    return rebuilt(value, Tensor, lambda tensor: next(taken))


def _uncalled() -> AbstractContextManager[None]:
    """Inside the block what asks tensors about themselves, by the ten thousand, is not taken for
    calls of torch's functions."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


class _Calls(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorder.call(func, args, kwargs or {})


class _Ops(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and keeping the compiler out would import it, for seconds.
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorder.op(func, args, kwargs or {})
