# SPDX-License-Identifier: Apache-2.0
"""How an event loop talks to engine cores in processes of their own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.client_link import ClientLink
from vllm.v1.engine.core_client import DEATH_CHECK_S, MPClient, start_replicas
from vllm.v1.engine.core_link import AttachedLink, CoreLink, RunningCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.replica_board import BoardShare
from vllm.v1.engine.replicas import undo

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor


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


class AsyncClient(MPClient):
    """Outputs for an event loop."""

    #: whether requests of other processes run in the cores, too
    shares_core: ClassVar[bool] = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        configs: Sequence[VllmConfig],
        links: Sequence[ClientLink],
        mailbox: _Mailbox,
        share: BoardShare | None = None,
    ) -> None:
        self._mailbox = mailbox
        super().__init__(vllm_config, configs, links, share)

    async def get_outputs(self) -> list[EngineCoreOutputs | EngineDeadError]:
        """All outputs that wait, at least one, in order; when the engine is dead, its error is the
        last one."""
        waiting = await self._mailbox.get()
        if self.router is not None:
            for outputs in waiting:
                if isinstance(outputs, EngineCoreOutputs):
                    self.router.observe(outputs)
        return waiting

    async def call_utility(self, method: str, *args: Any) -> Any:
        calls = [asyncio.wrap_future(future) for future in self._call(method, args)]
        if len(calls) == 1:
            return await calls[0]
        while (await asyncio.wait(calls, timeout=DEATH_CHECK_S))[1]:
            self.require_life()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        replicas, call = undo(method, answers)
        await asyncio.gather(*(asyncio.wrap_future(self.links[i].call(*call)) for i in replicas))
        return self._joined(method, answers)


class AsyncMPClient(AsyncClient):
    """For `AsyncLLM`, with cores of its own; further clients may be attached to those."""

    links: Sequence[CoreLink]

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        share: BoardShare | None = None,
    ) -> None:
        mailbox = _Mailbox()
        configs, links = start_replicas(vllm_config, executor_class, log_stats, mailbox.put)
        super().__init__(vllm_config, configs, links, mailbox, share)


class AttachedClient(AsyncClient):
    """For `AsyncLLM`, with cores that another process has started (see `AttachedLink`)."""

    shares_core = True
    links: Sequence[AttachedLink]

    def __init__(
        self,
        vllm_config: VllmConfig,
        cores: Sequence[RunningCore],
        client_index: int,
        share: BoardShare | None = None,
    ) -> None:
        mailbox = _Mailbox()
        links = [AttachedLink(core, client_index, mailbox.put) for core in cores]
        super().__init__(vllm_config, [c.vllm_config for c in cores], links, mailbox, share)
