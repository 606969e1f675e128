# SPDX-License-Identifier: Apache-2.0
"""One Ray actor per worker: Ray places and starts them, steps and answers travel beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.rendezvous import MeetingPlace
from vllm.utils import startup_phases
from vllm.v1.executor.ray_actors import RayActors
from vllm.v1.executor.stationed import StationedExecutor
from vllm.v1.executor.worker_process import WorkerPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RayExecutor(StationedExecutor):
    """Connects to Ray, or starts it; the model is loaded when the constructor returns."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._actors: RayActors | None = None
        self._place: MeetingPlace | None = None
        try:
            self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> None:
        with startup_phases.startup_phase("place actors"):
            actors = self._actors = RayActors(self.vllm_config)
            actors.place()
        place = self._place = MeetingPlace(actors.address)
        place.serve()
        plan = WorkerPlan.of(self.vllm_config, place.init_method)
        with startup_phases.startup_phase("connect actors"):
            stations = self._stations = actors.connect(plan)
        self._begin(plan, stations)

    def shutdown(self) -> None:
        super().shutdown()
        if self._place is not None:
            self._place.close()
        if self._actors is not None:
            actors, self._actors = self._actors, None
            actors.close()
