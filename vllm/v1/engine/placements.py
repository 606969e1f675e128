# SPDX-License-Identifier: Apache-2.0
"""Changing a supernet's placement while the engine lives: memory is planned for the mixers in use.

A change drops all state, so it waits until no request is left. What is computed under one placement
is never found under another: the memory of the cached prefixes is planned anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.placements import Placement
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger(__name__)

#: what a change may do with requests that run
MODES = ("wait", "refuse")
_BUSY = "requests are running; let them end, or change the placement with mode 'wait'"


def check_change_mode(mode: str) -> None:
    """`VLLMValidationError` for an unknown one."""
    if mode not in MODES:
        raise VLLMValidationError(f"mode must be 'wait' or 'refuse', got {mode!r}", "mode", mode)


def asked_for(
    method: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Placement | None:
    """The placement of a `collective_rpc("set_layer_placements", ...)`; None for another call."""
    if method != "set_layer_placements":
        return None
    found: Any = (*args, *(kwargs or {}).values())
    if len(found) != 1 or found[0] is None:
        raise VLLMValidationError("set_layer_placements takes one placement", "placement")
    placement: Placement = found[0]
    return placement


class PlacementGate:
    """Holds new requests back while the placement changes; one change at a time."""

    def __init__(self) -> None:
        self._lock, self._open = asyncio.Lock(), asyncio.Event()
        self._open.set()

    async def passed(self) -> None:
        """Wait until no change goes on."""
        await self._open.wait()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        async with self._lock:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()


def busy() -> VLLMValidationError:
    """What a change is refused with while requests run."""
    return VLLMValidationError(_BUSY, "mode")


@dataclass(frozen=True)
class PlacementChange:
    """What a front end is told of a change; `placements`: mixers by layer, from every worker.

    `is_busy`: requests run, so nothing was changed.
    """

    is_busy: bool
    placements: list[dict[int, str]]
    num_gpu_blocks: int | None = None
    capacity_tokens: int | None = None


class CorePlacements:
    """Changes the placement of all workers, or of none.

    `drain` takes the core through the steps that remain without a request; `plan` makes workers'
    memory configurations from what their layers keep, `adopt` is called with the first of them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        scheduler: SchedulerInterface,
        executor: Executor,
        drain: Callable[[], None],
        plan: Callable[[list[dict[str, KVCacheSpec]]], list[KVCacheConfig]],
        adopt: Callable[[KVCacheConfig], None],
    ) -> None:
        self._vllm_config = vllm_config
        self._scheduler, self._executor = scheduler, executor
        self._drain, self._plan, self._adopt = drain, plan, adopt

    def change(self, placement: Placement) -> PlacementChange:
        """Everything that can be refused is checked first: the names, that the new state fits.

        Raises `VLLMValidationError` for a placement the model does not have, or whose state does
        not fit into the memory; the placement is then as before.
        """
        if self._vllm_config.kv_transfer_config is not None:
            raise VLLMValidationError(
                "a connector knows the layers' memory by its addresses, so the placement cannot "
                "change; start the engine with --placement",
                "placement",
            )
        specs = self._executor.collective_rpc("get_placement_specs", args=(placement,))
        if self._scheduler.has_unfinished_requests():
            return PlacementChange(True, [])
        try:
            configs = self._plan(specs)
        except ValueError as error:
            raise VLLMValidationError(f"placement: {error}", "placement") from None
        self._drain()
        if not self._scheduler.reset_prefix_cache():
            raise RuntimeError("the placement cannot change: state blocks are still in use")
        begin = time.monotonic()
        found = self._executor.collective_rpc("apply_placement", args=(placement, configs[0]))
        self._scheduler.use_memory(configs[0])
        self._adopt(configs[0])
        logger.info("placement changed in %.2f s", time.monotonic() - begin)
        cache = self._vllm_config.cache_config
        return PlacementChange(False, found, cache.num_gpu_blocks, cache.capacity_tokens)
