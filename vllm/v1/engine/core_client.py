# SPDX-License-Identifier: Apache-2.0
"""How a front end talks to an engine core: in this process, or in one of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.utils.own_process import OwnProcess
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, StopRequest
from vllm.v1.engine.core_link import AttachedLink, ClientLink, CoreLink
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.parallel_sampling import child_requests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

_TICK_S = 0.001
#: longest wait for transfers after the last request
_FLUSH_S = 10.0


class EngineCoreClient(ABC):
    """Requests in, outputs out; used from one thread. Its core starts with the constructor and can
    be used after `wait_ready`, by the process that made it."""

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
    def abort_requests(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    def stop_requests(self, stops: list[StopRequest]) -> None:
        """End requests at a stop string; unlike aborted ones, each gets a last message."""

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Run a utility of the core and return its result."""

    @abstractmethod
    def flush(self) -> None:
        """With no request left: let workers and connector finish what they do for the last ones."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine; safe to call twice. `timeout`: seconds before the core is killed."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """One result per worker."""
        results: list[Any] = self.call_utility("collective_rpc", method, timeout, args, kwargs)
        return results

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        flags = (reset_running_requests, reset_connector)
        return bool(self.call_utility("reset_prefix_cache", *flags))


class InprocClient(EngineCoreClient):
    """The core in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`)."""

    engine_core: EngineCore

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor] | None, log_stats: bool
    ) -> None:
        self._setup = (vllm_config, executor_class, log_stats)
        self._decisions = vllm_config.decisions
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
            return EngineCoreOutputs(outputs=refused, timestamp=time.monotonic())
        with self._decisions.current():
            produced = self.engine_core.step()
        if not produced and self.engine_core.only_waits:
            time.sleep(_TICK_S)
        return produced.get(0) or EngineCoreOutputs(timestamp=time.monotonic())

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

    def flush(self) -> None:
        """Nobody else steps this core: without these steps transfers would never end."""
        deadline = time.monotonic() + _FLUSH_S
        while self.engine_core.has_work() and time.monotonic() < deadline:
            self.get_output()

    def shutdown(self, timeout: float | None = None) -> None:
        if self._finalizer is not None:
            self._finalizer()


class _MPClient:
    """The core in its own process. Sending never blocks."""

    def __init__(self, link: ClientLink) -> None:
        self._link = link
        self._finalizer = weakref.finalize(self, link.close)

    @property
    def process_id(self) -> int | None:
        return self._link.process_id

    def wait_ready(self) -> None:
        self._link.wait_ready()

    def require_own_process(self) -> None:
        self._link.process.require()

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        if requests:
            self._link.add(requests)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._link.abort(request_ids)

    def stop_requests(self, stops: list[StopRequest]) -> None:
        if stops:
            self._link.stop(stops)

    def shutdown(self, timeout: float | None = None) -> None:
        self._link.close(timeout)


class SyncMPClient(_MPClient, EngineCoreClient):
    """For `LLM`."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor] | None, log_stats: bool
    ) -> None:
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | EngineDeadError] = queue.SimpleQueue()
        super().__init__(CoreLink(vllm_config, executor_class, log_stats, self._outputs.put))

    def get_output(self) -> EngineCoreOutputs:
        self.require_own_process()
        if self._link.dead is not None and self._outputs.empty():
            raise EngineDeadError(self._link.dead.cause)
        outputs = self._outputs.get()
        if isinstance(outputs, EngineDeadError):
            raise outputs
        return outputs

    def call_utility(self, method: str, *args: Any) -> Any:
        return self._link.call(method, *args).result()

    def flush(self) -> None:
        """The core's own loop goes on as long as there is anything to wait for."""


class _Mailbox:
    """Hands outputs from the reader's thread to an event loop, chosen when first awaited."""

    def __init__(self) -> None:
        self._items: deque[EngineCoreOutputs | EngineDeadError] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: EngineCoreOutputs | EngineDeadError) -> None:
        with self._lock:
            self._items.append(item)
            loop, waiting = self._loop, self._waiter is not None
        if loop is not None and waiting and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> list[EngineCoreOutputs | EngineDeadError]:
        """All there are, at least one."""
        while True:
            with self._lock:
                if self._items:
                    items = list(self._items)
                    self._items.clear()
                    return items
                self._loop = asyncio.get_running_loop()
                self._waiter = self._loop.create_future()
                waiter = self._waiter
            await waiter


class _AsyncClient(_MPClient):
    """Outputs for an event loop."""

    def __init__(self, link: ClientLink, mailbox: _Mailbox) -> None:
        self._mailbox = mailbox
        super().__init__(link)

    @property
    def dead(self) -> EngineDeadError | None:
        """Set as soon as the engine's death is known."""
        return self._link.dead

    async def get_outputs(self) -> list[EngineCoreOutputs | EngineDeadError]:
        """All outputs that wait, at least one, in order; when the engine is dead, its error is the
        last one."""
        return await self._mailbox.get()

    async def call_utility(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._link.call(method, *args))


class AsyncMPClient(_AsyncClient):
    """For `AsyncLLM`, with a core of its own; further clients may be attached to that."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor] | None, log_stats: bool
    ) -> None:
        mailbox = _Mailbox()
        #: the sockets' end
        self.link = CoreLink(vllm_config, executor_class, log_stats, mailbox.put)
        super().__init__(self.link, mailbox)


class AttachedClient(_AsyncClient):
    """For `AsyncLLM`, with a core that another process has started (see `AttachedLink`)."""

    def __init__(self, directory: str, client_index: int, core_process_id: int | None) -> None:
        mailbox = _Mailbox()
        #: the sockets' end
        self.link = AttachedLink(directory, client_index, core_process_id, mailbox.put)
        super().__init__(self.link, mailbox)
