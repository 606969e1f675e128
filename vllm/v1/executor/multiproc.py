# SPDX-License-Identifier: Apache-2.0
"""One process per worker, on this host and on the others of `--nnodes`."""

from __future__ import annotations

from vllm.distributed.rendezvous import MeetingPlace
from vllm.utils import startup_phases
from vllm.utils.own_directory import make_directory, remove_directory
from vllm.v1.executor.local_workers import LocalWorkers
from vllm.v1.executor.stationed import StationedExecutor
from vllm.v1.executor.worker_process import WorkerPlan


class MultiprocExecutor(StationedExecutor):
    """Starts a process per rank; the model is loaded when the constructor returns."""

    def _start(self) -> None:
        if self.vllm_config.parallel_config.nnodes == 1:
            self._start_here()
        else:
            self._start_everywhere()

    def _start_here(self) -> None:
        directory = make_directory()
        try:
            plan = WorkerPlan.of(self.vllm_config, f"file://{directory}/store")
            with startup_phases.startup_phase("spawn workers"):
                workers = LocalWorkers(plan, self._ranks)
            self._begin(plan, [workers])
        finally:
            remove_directory(directory)  # the ranks have met

    def _start_everywhere(self) -> None:
        """The other hosts first: theirs start while this one's do."""
        from vllm.v1.executor.message_socket import interface_of
        from vllm.v1.executor.node_link import gather_nodes

        parallel = self.vllm_config.parallel_config
        place = self._place = MeetingPlace(parallel.master_addr)
        plan = WorkerPlan.of(self.vllm_config, place.init_method)
        with startup_phases.startup_phase("wait for hosts"):
            nodes = self._stations = gather_nodes(self.vllm_config, plan)
        with startup_phases.startup_phase("spawn workers"):
            ranks = self._ranks[: parallel.local_world_size]
            interface = interface_of(nodes[0].own_address)
            workers = LocalWorkers(plan, ranks, interface, (*nodes, place))
        self._stations = stations = [*nodes, workers]
        place.serve()
        self._begin(plan, stations)
