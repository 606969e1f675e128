# SPDX-License-Identifier: Apache-2.0
"""An asynchronous engine at rest: asleep, or for a moment without requests so that the placement of
a supernet can change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_client import AsyncClient
from vllm.v1.engine.output_handler import OutputHandler
from vllm.v1.engine.placements import PlacementChange, PlacementGate, busy
from vllm.v1.engine.sleep import check_mode, check_sleep, check_tags

if TYPE_CHECKING:
    from vllm.model_executor.placements import Placement
    from vllm.v1.engine.front_end import FrontEnd

#: pause between looks at whether all requests have ended
_TICK_S = 0.02


class AsyncRest:
    """Waits for a front end's requests, or ends them, before the core is told."""

    def __init__(
        self, engine_core: AsyncClient, front_end: FrontEnd, handler: OutputHandler
    ) -> None:
        self._engine_core = engine_core
        self._front_end = front_end
        self._handler = handler
        #: held by the call that changes what sleeps
        self._sleep_lock = asyncio.Lock()
        #: passed by every request before it starts
        self.placement_gate = PlacementGate()

    def _any_runs(self) -> bool:
        return self._front_end.output_processor.has_unfinished_requests()

    # ---- sleep ---------------------------------------------------------------------------------

    async def sleep(self, level: int, mode: str) -> None:
        """See `AsyncLLM.sleep`."""
        check_sleep(self._front_end.vllm_config, level)
        check_mode(mode)
        with self._front_end.sleep.waiting() as check:
            await self._requests_end(mode, check)
            # Once the core is told, its answer counts, whether or not the caller waits for it.
            await asyncio.shield(self._fall_asleep(level, check))

    async def _requests_end(self, mode: str, check: Callable[[], None]) -> None:
        """Abort the unfinished requests, or wait for them."""
        if mode == "abort":
            self._handler.abort(self._front_end.output_processor.external_ids())
        while self._any_runs():
            await asyncio.sleep(_TICK_S)
            check()

    async def _fall_asleep(self, level: int, check: Callable[[], None]) -> None:
        async with self._sleep_lock:
            check()
            with self._front_end.sleep.falling_asleep():
                await self._engine_core.call_utility("sleep", level)
            self._front_end.note_sleep(level)

    @contextlib.asynccontextmanager
    async def resting(self, mode: str) -> AsyncGenerator[None, None]:
        """One process's part of a sleep that another one commands: no request of this front end
        runs, and new ones are refused, while the block lasts. A wake-up calls it off."""
        with self._front_end.sleep.waiting() as check:
            await self._requests_end(mode, check)
            # The order comes by another way than the aborts: this answer comes after them.
            await self._engine_core.call_utility("check_health")
            yield

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """See `AsyncLLM.wake_up`."""
        chosen = check_tags(tags)
        self._front_end.sleep.call_off()
        await asyncio.shield(self._wake_up(chosen))

    async def _wake_up(self, tags: tuple[str, ...]) -> None:
        async with self._sleep_lock:
            await self._engine_core.call_utility("wake_up", tags)
            self._front_end.note_wake_up(tags)

    # ---- placement -----------------------------------------------------------------------------

    async def admitted(self, placement: Placement) -> str:
        """What the core says to a request with this placement that starts at once, while no change
        goes on: the next one may leave no room for it."""
        while True:
            self._front_end.require_awake()
            answer: str = await self._engine_core.call_utility("admit_placement", placement)
            if self.placement_gate.is_open:
                return answer
            await self.placement_gate.passed()

    @contextlib.asynccontextmanager
    async def one_placement(self) -> AsyncGenerator[str | None, None]:
        """See `AsyncLLM.one_placement`."""
        async with self.placement_gate.kept_open():
            yield await self._engine_core.call_utility("own_placement")

    async def change_placement(self, placement: Placement, mode: str) -> list[dict[int, str]]:
        """See `AsyncLLM.change_placement`."""
        placement = self.placement_to_use(placement, mode)
        if mode == "overlap":
            return await asyncio.shield(self._overlap_placement(placement))
        async with self.placement_gate.closed(waits=mode == "wait"):
            if self._engine_core.router is not None:
                # All replicas or none: not before none of them has a request.
                await self._no_request_runs(mode)
                mode = "wait"
            while (change := await asyncio.shield(self._change_placement(placement))).is_busy:
                if mode == "refuse":
                    raise busy()
                await self._no_request_runs(mode)
                await asyncio.sleep(_TICK_S)
        return change.placements

    def placement_to_use(self, asked: Placement, mode: str) -> Placement:
        """What `asked` is, or is an alias of; `VLLMValidationError` for a mode that is not possible
        here."""
        check_mode(mode, ("wait", "refuse", "overlap"))
        replicas, processes = self._engine_core.router is not None, self._engine_core.shares_core
        if mode == "overlap" and replicas:
            wait = "use 'wait'"
            if processes:
                wait = "start the engine with --api-server-count 1 and use 'wait'"
            raise VLLMValidationError(
                "mode 'overlap' is for one replica: others may find no place for the placement; "
                f"{wait}",
                "mode",
            )
        if mode != "overlap" and processes:
            overlap = "" if replicas else "change the placement with mode 'overlap', or "
            raise VLLMValidationError(
                "several API processes serve this engine, and none can hold back the others' "
                f"requests; {overlap}start the engine with --api-server-count 1",
                "mode",
            )
        return self._front_end.placement_of(asked)

    async def _overlap_placement(self, placement: Placement) -> list[dict[int, str]]:
        change: PlacementChange = await self._engine_core.call_utility(
            "overlap_placement", placement
        )
        self._front_end.show_placement(placement, change)
        return change.placements

    async def _no_request_runs(self, mode: str) -> None:
        while self._any_runs():
            if mode == "refuse":
                raise busy()
            await asyncio.sleep(_TICK_S)

    async def _change_placement(self, placement: Placement) -> PlacementChange:
        change: PlacementChange = await self._engine_core.call_utility(
            "change_placement", placement
        )
        if not change.is_busy:
            self._front_end.show_placement(placement, change)
        return change
