# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs in the place of the simulator's recordings, with the same questions asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.compilation.graph_safety.device.sync_trap import torch_waits_warn
from vllm.compilation.graph_safety.simulator.checked_run import SimulatedGraph
from vllm.compilation.graph_safety.simulator.reads import stores_element
from vllm.compilation.graph_safety.simulator.recorder import Recorder
from vllm.compilation.graph_safety.simulator.spots import Spot, here, spot_of_error
from vllm.compilation.graph_safety.simulator.trace import Trace

#: what no capture goes on after: waits, uploads, other devices, kernels that are compiled or timed
_ENDS_CAPTURE = frozenset({13, 14, 25})


class CapturedGraph(SimulatedGraph):
    """A segment that the current stream, which may not be the default one, captures for a GPU to
    replay. The recorder listens; its notes say which line a difference is on."""

    runs_at_capture = False

    def __init__(self, recorder: Recorder, trace: Trace) -> None:
        super().__init__(recorder, trace)
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        super().begin()
        with self._recorder.unseen():
            self._graph.capture_begin(capture_error_mode="thread_local")

    def end(self) -> None:
        with self._recorder.unseen():
            self._graph.capture_end()
        super().end()

    def replay(self) -> None:
        self._graph.replay()


class DeviceRecorder(Recorder):
    """Reports a read, an upload or a shape that depends on data where torch has waited for the GPU
    or refuses the call; what the call is named says only which item of the checklist it is."""

    def __init__(self, frozen: set[int]) -> None:
        super().__init__(frozen)
        #: whether something was found after which no capture goes on
        self.ends_capture = False
        self._suspicion: tuple[int, Spot, str, bool] | None = None

    def report(self, hazard: int, spot: Spot, message: str) -> None:
        if hazard == 25 and self._depth:
            # The first launch of an op's own kernel, which a capture comes after.
            return
        self.ends_capture |= hazard in _ENDS_CAPTURE and not self._in_break
        if hazard == 14:
            # Whoever reads, uploads or tunes waits as well.
            self.report_once(hazard, spot, message)
        else:
            super().report(hazard, spot, message)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._suspicion = None
        return super().call(function, args, kwargs)

    def _suspect(self, hazard: int, spot: Spot, message: str, *, is_read: bool = False) -> None:
        self._suspicion = (hazard, spot, message, is_read)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block waits of torch are seen, too."""
        with super().watched(), torch_waits_warn(self._waited):
            yield

    def _waited(self) -> None:
        spot, suspicion = here(), self._suspicion
        if suspicion is None or suspicion[1].region[0] != spot.region[0]:
            if stores_element(spot):
                suspicion = (4, spot, "a number of Python is copied to the device", False)
            else:
                suspicion = (14, spot, "an op of torch waits for the device", False)
        self._found(*suspicion)

    def refused(self, error: BaseException) -> bool:
        """Whether an error is of a call that gives the host what lies on a GPU, such as `numpy()`;
        it is reported."""
        suspicion = self._suspicion
        if suspicion is None or suspicion[1].region[0] != spot_of_error(error).region[0]:
            return False
        self._found(*suspicion)
        return True

    def _found(self, hazard: int, spot: Spot, message: str, is_read: bool) -> None:
        if is_read:
            self._trace.reads.append(spot)
        self.ends_capture |= not self._in_break
        self.report(hazard, spot, message)
