# SPDX-License-Identifier: Apache-2.0
"""Which launch made the infinities or NaN that state memory holds after the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm.compilation.graph_safety.simulator.driver import Driver
from vllm.compilation.graph_safety.simulator.functions import weights_of
from vllm.compilation.graph_safety.simulator.outcomes import step_spot
from vllm.compilation.graph_safety.simulator.recorder import UNFILLED, Recorder
from vllm.compilation.graph_safety.simulator.spots import Spot, here
from vllm.compilation.graph_safety.simulator.tensors import Handle, tensors_in
from vllm.compilation.graph_safety.simulator.trace import NotReplayable
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import StepGraphs


def layers_not_finite(runner: ModelRunner, driver: Driver) -> list[str]:
    """Layers whose state holds what is no finite number, of the requests that go on. Waits for the
    device."""
    found = []
    for index, group in enumerate(runner.groups):
        blocks = driver.written_blocks(index)
        for name in group.layer_names:
            views = [view[blocks] for view in tensors_in(runner.layers[name].kv_cache)]
            if any(map(_has_no_number, views)):
                found.append(name)
    return found


def why_not_finite(
    runner: ModelRunner, driver: Driver, layers: list[str], steps: int
) -> list[NotReplayable]:
    """One finding for `layers`, where their first infinity or NaN comes from: `steps` steps from
    the start run again, eagerly, and each launch's tensors are looked at. Nothing for no layer; all
    ranks look together."""
    ranks = get_world_group()
    if ranks.all_agree(not layers):
        return []
    follower = _Follower(weights_of(*runner.models))
    runner.graphs = StepGraphs()
    driver.restart()
    state = Handle.of(runner.arena.buffer).memory
    for _ in range(steps):
        with follower.recording(undone=False) as trace:
            follower.begin_segment()
            driver.step()
        trace.owned.clear()
        if ranks.all_agree(state in follower.causes or not layers):
            break
    driver.restart()
    if not layers:
        return []
    more = f" (and of {len(layers) - 1} other layers)" if len(layers) > 1 else ""
    message = f"the state of {layers[0]}{more} holds NaN or infinities after the steps"
    return [NotReplayable(28, follower.causes.get(state, step_spot()), message)]


class _Follower(Recorder):
    """Follows what is no finite number from launch to launch. `causes`: by memory, the launch that
    made the first of them from finite numbers. Minus infinities of a mask end where softmax does
    away with them, so they are no cause of what lies in the state."""

    def __init__(self, frozen: set[int]) -> None:
        super().__init__(frozen)
        self.causes: dict[int, Spot] = {}

    def report(self, hazard: int, spot: Spot, message: str) -> None:
        """Others look for hazards."""

    def _launch(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mutates: bool,
        is_collective: bool = False,
    ) -> Any:
        spot, given = here(), tensors_in((args, kwargs))
        with self.unseen():
            known = {Handle.of(tensor).memory for tensor in given}
            bad = [Handle.of(tensor).memory for tensor in given if _has_no_number(tensor)]
        cause = next((self.causes[memory] for memory in bad if memory in self.causes), spot)
        result = super()._launch(name, run, args, kwargs, mutates, is_collective)
        with self.unseen():
            for tensor in [*tensors_in(result), *given]:
                memory = Handle.of(tensor).memory
                if memory not in known:
                    # Others had this name before.
                    self.causes.pop(memory, None)
                if name not in UNFILLED and memory not in bad and _has_no_number(tensor):
                    self.causes.setdefault(memory, cause)
        return result


def _has_no_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.float().isfinite().all())
