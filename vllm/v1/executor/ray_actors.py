# SPDX-License-Identifier: Apache-2.0
"""The actors of an engine on a Ray cluster, from their placement to their end."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pickle
import secrets
import select
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm import decisions
from vllm.config import VllmConfig
from vllm.distributed.rendezvous import MeetingPlace, listen
from vllm.exceptions import StartTimeoutError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.v1.executor.device_checks import check_equal_devices
from vllm.v1.executor.message_socket import MessageSocket
from vllm.v1.executor.node_agreement import check_versions
from vllm.v1.executor.ray_address import await_cluster
from vllm.v1.executor.ray_witness import RayWitness, Sight
from vllm.v1.executor.ray_worker import RayWorker, carried
from vllm.v1.executor.remote_workers import RemoteWorkers
from vllm.v1.executor.stationed import StationedExecutor
from vllm.v1.executor.worker_process import WorkerPlan

logger = init_logger(__name__)

_SLICE_S = 0.5
#: who connects says the secret this soon, or is a stranger
_HELLO_S = 5.0


class RayActors:
    """One actor per rank, in a placement group, and a witness on each node. `address`: this host's,
    at which they answer.

    Raises what `await_cluster` raises, and `StartTimeoutError` when Ray has no room for them in
    `--distributed-timeout-seconds`.
    """

    def __init__(self, config: VllmConfig) -> None:
        parallel = config.parallel_config
        self._size = parallel.world_size
        self._tensor_parallel_size = parallel.tensor_parallel_size
        self._timeout_s = parallel.hosts_timeout_s
        self._resource = "CPU" if config.device_config.device_type == "cpu" else "GPU"
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._witnesses: dict[str, Any] = {}
        self._sights: list[Sight] = []
        self._starts_ray = not ray.is_initialized()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._starts_ray:
            await_cluster(os.environ.get("RAY_ADDRESS", ""), self._timeout_s)
            ray.init()
        self.address: str = ray.util.get_node_ip_address()

    def place(self) -> None:
        """Start the actors where Ray finds room, the ranks of this host first."""
        logger.info("waiting for room for %d Ray actors, a %s each", self._size, self._resource)
        group = self._group = placement_group([{self._resource: 1}] * self._size, "PACK")
        if not ray.wait([group.ready()], timeout=self._timeout_s)[0]:
            raise StartTimeoutError(
                f"Ray has no room for {self._size} workers with a {self._resource} each after "
                f"{self._timeout_s:g} s (--distributed-timeout-seconds): the cluster has "
                f"{ray.cluster_resources().get(self._resource, 0):g}, of which "
                f"{ray.available_resources().get(self._resource, 0):g} are free"
            )
        amounts = {"num_cpus": 0, f"num_{self._resource.lower()}s": 1}
        environment = carried(os.environ)
        started = [
            self._start(group, index, RayWorker, amounts, environment)
            for index in range(self._size)
        ]
        self._actors = started
        places = ray.get([actor.place.remote() for actor in started], timeout=self._timeout_s)
        hosts = [address for address, _, _ in places]
        order = sorted(range(self._size), key=lambda i: (hosts[i] != self.address, hosts[i], i))
        self._actors = [started[index] for index in order]
        for index in order:
            _, node, pid = places[index]
            if node not in self._witnesses:
                self._witnesses[node] = self._start(group, index, RayWitness, {"num_cpus": 0})
            self._sights.append(Sight(self._witnesses[node], pid))
        shown = [hosts[index] for index in order]
        decisions.record("workers", f"{self._size} Ray actors", f"by rank on {', '.join(shown)}")

    def _start(
        self, group: PlacementGroup, index: int, kind: type, amounts: dict[str, Any], *args: Any
    ) -> Any:
        """An actor of `kind` in a bundle of the group, with `amounts` of its resources."""
        strategy = PlacementGroupSchedulingStrategy(group, index)
        remote: Any = ray.remote(kind)
        options = {**amounts, "max_restarts": 0, "scheduling_strategy": strategy}
        return remote.options(**options).remote(*args)

    def connect(self, plan: WorkerPlan) -> list[RemoteWorkers]:
        """Let the actors work; returns the connections to them, by rank."""
        listener = listen(self.address, 0)
        secret = secrets.token_hex(16)
        runs = [
            actor.run.remote(pickle.dumps(plan), rank, listener.getsockname()[:2], secret)
            for rank, actor in enumerate(self._actors)
        ]
        links: dict[int, _ActorLink] = {}
        names = [""] * self._size
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(links) < self._size:
                if select.select([listener], [], [], _SLICE_S)[0]:
                    accepted, (peer, *_) = listener.accept()
                    hello = _heard(MessageSocket(accepted, peer), secret)
                    if hello is not None:
                        rank, names[rank] = hello.rank, hello.device
                        links[rank] = _ActorLink(
                            hello.connection, rank, self._actors[rank], self._sights[rank]
                        )
                        check_versions(hello.versions, links[rank].name)
                for failed in ray.wait(runs, timeout=0)[0]:
                    ray.get(failed)  # raises what it failed with
                if time.monotonic() > deadline:
                    missing = sorted(set(range(self._size)) - set(links))
                    raise StartTimeoutError(
                        f"the Ray actors of ranks {missing} have not connected to {self.address} "
                        f"in {self._timeout_s:g} s (--distributed-timeout-seconds)"
                    )
            check_equal_devices(names, self._tensor_parallel_size)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            listener.close()
        return [links[rank] for rank in range(self._size)]

    def close(self) -> None:
        """End the actors and give back what they had."""
        for actor in (*self._actors, *self._witnesses.values()):
            _kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        if self._starts_ray:
            ray.shutdown()


class _ActorLink(RemoteWorkers):
    """A worker in an actor, which does not outlive its end."""

    def __init__(self, connection: MessageSocket, rank: int, actor: Any, sight: Sight) -> None:
        name = f"the Ray actor of rank {rank} ({connection.peer})"
        super().__init__(connection, range(rank, rank + 1), name)
        self._actor, self._sight = actor, sight

    def sees_work(self, rank: int) -> bool | None:
        return self._sight.sees_work()

    def finish_end(self, deadline: float) -> None:
        super().finish_end(deadline)
        _kill(self._actor)


def _kill(actor: Any) -> None:
    """Ray may be gone itself."""
    with contextlib.suppress(Exception):
        ray.kill(actor)


@dataclass(frozen=True)
class _Hello:
    """What an actor says first; `versions`: as of `node_agreement`."""

    connection: MessageSocket
    rank: int
    device: str
    versions: dict[str, str]


def _heard(connection: MessageSocket, secret: str) -> _Hello | None:
    """None for a stranger, who is sent away."""
    with contextlib.suppress(TimeoutError, EOFError, ValueError, KeyError, TypeError):
        hello = json.loads(connection.receive(_HELLO_S))
        if hmac.compare_digest(hello["secret"], secret):
            versions = hello.get("versions", {})
            return _Hello(connection, hello["rank"], hello["device"], versions)
    logger.warning("%s connected and is no worker of this engine", connection.peer)
    connection.close()
    return None


class RayExecutor(StationedExecutor):
    """Connects to Ray, or starts it; the model is loaded when the constructor returns."""

    _actors: RayActors | None = None

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

    def shutdown(self, reason: str | None = None) -> None:
        super().shutdown(reason)
        if self._actors is not None:
            actors, self._actors = self._actors, None
            actors.close()
