# SPDX-License-Identifier: Apache-2.0
"""How `LLM` talks to an engine core: in this process, or in one of its own."""

from __future__ import annotations

import queue
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.utils.own_directory import make_directory, remove_directory
from vllm.utils.own_process import OwnProcess
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, StopRequest
from vllm.v1.engine.client_link import ClientLink, Sink, client_addresses
from vllm.v1.engine.core_link import CoreLink, await_ready
from vllm.v1.engine.core_process import CoreProcess
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.parallel_sampling import child_requests
from vllm.v1.engine.replica_board import BoardShare
from vllm.v1.engine.replicas import (
    adopt_starts,
    combined,
    device_environment,
    forgets_prefixes,
    replica_configs,
    undo,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.replica_router import ReplicaRouter
    from vllm.v1.executor.abstract import Executor

T = TypeVar("T")

_TICK_S = 0.001
#: longest wait for transfers after the last request
_FLUSH_S = 10.0
#: how often who waits for all replicas looks whether one is dead
DEATH_CHECK_S = 0.5


class EngineCoreClient(ABC):
    """Requests in, outputs out; used from one thread. Its core starts with the constructor and can
    be used after `wait_ready`, by the process that made it."""

    #: of each replica, in the order of their ranks
    configs: Sequence[VllmConfig]
    #: chooses among several replicas
    router: ReplicaRouter | None = None

    @abstractmethod
    def require_own_process(self) -> None:
        """Raise `RuntimeError` in a forked child, which has none of the threads behind the core."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Block until the core can take requests; raises what kept it from starting."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The next outputs; `EngineDeadError` when the engine is dead."""

    @abstractmethod
    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """Queue requests; none of them is scheduled before the core knows all."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests."""

    @abstractmethod
    def stop_requests(self, stops: list[StopRequest]) -> None:
        """End requests at a stop string; unlike aborted ones, each gets a last message."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Run a utility of the core and return its result."""

    @abstractmethod
    def flush(self) -> Iterator[EngineCoreOutputs]:
        """With no request left: let workers and connector finish what they do for the last ones;
        what they say of it, as `get_output`."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine; safe to call twice. `timeout`: seconds before the core is killed."""


class InprocClient(EngineCoreClient):
    """The core in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`)."""

    engine_core: EngineCore

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor] | None, log_stats: bool
    ) -> None:
        if len(vllm_config.parallel_config.local_ranks) > 1:
            raise VLLMValidationError(
                "several replicas are processes of their own; unset "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0, or use --data-parallel-size 1",
                "data_parallel_size",
            )
        self._vllm_config = vllm_config
        (own,) = self.configs = replica_configs(vllm_config)
        self._setup = (own, executor_class, log_stats)
        self._rank = own.parallel_config.data_parallel_rank
        self._decisions = own.decisions
        self._refused: list[EngineCoreOutput] = []
        self._process = OwnProcess()
        self._finalizer: weakref.finalize[..., InprocClient] | None = None

    def wait_ready(self) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        vllm_config, executor_class, log_stats = self._setup
        executor_class = executor_class or Executor.get_class(vllm_config)
        with self._decisions.current():
            self.engine_core = EngineCore(vllm_config, executor_class, log_stats)
        adopt_starts(self._vllm_config, self.configs)
        self._finalizer = weakref.finalize(
            self, self._process.run_if_own, self.engine_core.shutdown
        )

    def require_own_process(self) -> None:
        self._process.require()

    def get_output(self) -> EngineCoreOutputs:
        """One step's outputs; empty while the first of several concurrent steps is launched."""
        self._process.require()
        if self._refused:
            refused, self._refused = self._refused, []
            return EngineCoreOutputs(
                outputs=refused, timestamp=time.monotonic(), engine_index=self._rank
            )
        with self._decisions.current():
            produced = self.engine_core.step()
        if not produced and self.engine_core.only_waits:
            time.sleep(_TICK_S)
        outputs = produced.get(0) or EngineCoreOutputs(timestamp=time.monotonic())
        outputs.engine_index = self._rank
        return outputs

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        self._process.require()
        with self._decisions.current():
            for child in chain.from_iterable(map(child_requests, requests)):
                refused = self.engine_core.add_request(self.engine_core.receive(child))
                if refused is not None:
                    self._refused.append(refused)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.engine_core.abort_requests(request_ids)

    def stop_requests(self, stops: list[StopRequest]) -> None:
        self.engine_core.stop_requests(stops)

    def call_utility(self, method: str, *args: Any) -> Any:
        self._process.require()
        with self._decisions.current():
            return self.engine_core.call_utility(method, args)

    def flush(self) -> Iterator[EngineCoreOutputs]:
        """Steps the core until it is idle: transfers make progress only in its steps."""
        deadline = time.monotonic() + _FLUSH_S
        while self.engine_core.has_work() and time.monotonic() < deadline:
            yield self.get_output()

    def shutdown(self, timeout: float | None = None) -> None:
        if self._finalizer is not None:
            self._finalizer()


class MPClient:
    """Cores in processes of their own, one per replica. Sending never blocks."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        configs: Sequence[VllmConfig],
        links: Sequence[ClientLink],
        share: BoardShare | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._share = share
        #: of each replica, in the order of their ranks
        self.configs = configs
        self.links = links
        #: chooses among several replicas
        self.router: ReplicaRouter | None = None
        self._finalizer = weakref.finalize(self, close_all, links)

    @property
    def process_id(self) -> int | None:
        """The first core's process, if it is the client's own."""
        core = self.links[0].core
        return None if core is None else core.process.pid

    @property
    def dead(self) -> EngineDeadError | None:
        """Set as soon as the death of one replica is known."""
        return next((link.dead for link in self.links if link.dead is not None), None)

    def require_life(self) -> None:
        """Raises the error of a replica that is dead: others may be stopped, and never answer."""
        if (dead := self.dead) is not None:
            raise dead

    def wait_ready(self) -> None:
        await_ready(self.links)
        adopt_starts(self._vllm_config, self.configs)
        if len(self.links) > 1:
            # Chains of hashes come with the core's own modules, which a front end seldom needs.
            from vllm.v1.engine.replica_router import make_router

            self.router = make_router(self._vllm_config, self.configs, self._share)

    def require_own_process(self) -> None:
        self.links[0].process.require()

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        if requests:
            placed = {0: requests} if self.router is None else self.router.place(requests)
            for replica, own in placed.items():
                self.links[replica].add(own)

    def abort_requests(self, request_ids: list[str]) -> None:
        groups = self._by_replica(request_ids, lambda request_id: request_id)
        if self.router is not None:
            self.router.end(request_ids)
        for replica, own in groups.items():
            self.links[replica].abort(own)

    def stop_requests(self, stops: list[StopRequest]) -> None:
        for replica, own in self._by_replica(stops, lambda stop: stop.request_id).items():
            self.links[replica].stop(own)

    def _by_replica(self, items: list[T], request_id: Callable[[T], str]) -> dict[int, list[T]]:
        """Messages about requests, by where those run."""
        if self.router is None:
            return {0: items} if items else {}
        return self.router.by_replica(items, request_id)

    def shutdown(self, timeout: float | None = None) -> None:
        close_all(self.links, timeout)

    def _call(self, method: str, args: tuple[Any, ...]) -> list[Future[Any]]:
        """Ask all replicas at once."""
        if self.router is not None and forgets_prefixes(method, args):
            self.router.forget_prefixes()
        futures: list[Future[Any]] = []
        for link in self.links:
            try:
                futures.append(link.call(method, *args))
            except EngineDeadError as error:
                dead: Future[Any] = Future()
                dead.set_exception(error)
                futures.append(dead)
        return futures

    def _joined(self, method: str, answers: Sequence[Any]) -> Any:
        """The answers of all replicas as one; see `combined`."""
        answer = combined(method, self._ranks, answers)
        if method == "change_placement" and self.router is not None and not answer.is_busy:
            self.router.use_capacities([one.capacity_tokens for one in answer.memory])
        return answer

    @property
    def _ranks(self) -> list[int]:
        return [config.parallel_config.data_parallel_rank for config in self.configs]


def close_all(links: Sequence[ClientLink], timeout: float | None = None) -> None:
    """Stop all cores; they end at the same time."""
    for link in links:
        link.begin_close()
    for link in links:
        link.close(timeout)


def _make_directory() -> str:
    """Of the sockets between a core and its clients."""
    base = envs.VLLM_RPC_BASE_PATH
    try:
        return make_directory(base)
    except OSError as error:
        raise VLLMValidationError(
            f"VLLM_RPC_BASE_PATH={base}: no directory for the engine's sockets can be made there: "
            f"{error.strerror}; by default it is that of temporary files (TMPDIR)"
        ) from None


def start_replicas(
    vllm_config: VllmConfig,
    executor_class: type[Executor] | None,
    log_stats: bool,
    sink: Sink,
) -> tuple[list[VllmConfig], list[CoreLink]]:
    """Start the core of every replica of this server; each has devices of its own. Processes start
    before any socket or thread exists, so that forking is safe."""
    configs = replica_configs(vllm_config)
    directories = [_make_directory() for _ in configs]
    started: list[CoreProcess] = []
    try:
        for index, (config, directory) in enumerate(zip(configs, directories, strict=True)):
            if config.parallel_config.replicas_share_experts:
                config.parallel_config.meeting_directory = directories[0]
            environment = device_environment(config, index) if index else None
            addresses = client_addresses(directory, 0)
            with config.decisions.current():
                core = CoreProcess(config, executor_class, log_stats, addresses, environment)
            started.append(core)
    except BaseException:
        for core in started:
            core.stop(0.0)
        for directory in directories:
            remove_directory(directory)
        raise
    links: list[CoreLink] = []
    for config, core, directory in zip(configs, started, directories, strict=True):
        rank = config.parallel_config.data_parallel_rank
        name = f"replica {rank}: " if len(configs) > 1 else ""
        links.append(CoreLink(config, core, directory, sink, name, reports_start=not links))
    return configs, links


class SyncMPClient(MPClient, EngineCoreClient):
    """For `LLM`."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor] | None, log_stats: bool
    ) -> None:
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        configs, links = start_replicas(vllm_config, executor_class, log_stats, self._outputs.put)
        super().__init__(vllm_config, configs, links)

    def get_output(self) -> EngineCoreOutputs:
        self.require_own_process()
        if (dead := self.dead) is not None and self._outputs.empty():
            raise EngineDeadError(dead.cause)
        outputs = self._outputs.get()
        if isinstance(outputs, EngineDeadError):
            raise outputs
        if self.router is not None:
            self.router.observe(outputs)
        return outputs

    def call_utility(self, method: str, *args: Any) -> Any:
        futures = self._call(method, args)
        if len(futures) == 1:
            return futures[0].result()
        while wait(futures, DEATH_CHECK_S).not_done:
            self.require_life()
        answers = [future.exception() or future.result() for future in futures]
        replicas, call = undo(method, answers)
        for future in [self.links[i].call(*call) for i in replicas]:
            future.result()
        return self._joined(method, answers)

    def flush(self) -> Iterator[EngineCoreOutputs]:
        """The core's own loop goes on as long as there is anything to wait for, and what it says
        comes with the next outputs."""
        return iter(())
