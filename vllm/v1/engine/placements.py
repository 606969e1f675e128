# SPDX-License-Identifier: Apache-2.0
"""What front ends and the core say to each other about a supernet's placements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.placements import as_text

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.placements import Placement
    from vllm.v1.engine import EngineCoreRequest

_BUSY = "requests are running; let them end, or change the placement with mode 'wait'"


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
        #: blocks of `kept_open`
        self._num_keep, self._nobody_keeps = 0, asyncio.Event()
        self._nobody_keeps.set()

    @property
    def is_open(self) -> bool:
        """Whether no change goes on."""
        return self._open.is_set()

    async def passed(self) -> None:
        """Wait until no change goes on."""
        await self._open.wait()

    @asynccontextmanager
    async def kept_open(self) -> AsyncIterator[None]:
        """No change begins before the end of the block, which waits for those that are due."""
        async with self._lock:
            self._num_keep += 1
            self._nobody_keeps.clear()
        try:
            yield
        finally:
            self._num_keep -= 1
            if not self._num_keep:
                self._nobody_keeps.set()

    @asynccontextmanager
    async def closed(self, waits: bool) -> AsyncIterator[None]:
        """Unless it `waits`, raises `busy` while somebody keeps the gate open."""
        async with self._lock:
            if not waits and self._num_keep:
                raise busy()
            await self._nobody_keeps.wait()
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()


def busy() -> VLLMValidationError:
    """What a change is refused with while requests run."""
    return VLLMValidationError(_BUSY, "mode")


class MemorySize(NamedTuple):
    """As `CacheConfig` has them."""

    num_gpu_blocks: int | None
    capacity_tokens: int | None

    @classmethod
    def of_all(cls, sizes: Sequence[MemorySize]) -> MemorySize:
        """What replicas have together; None where none says how much."""
        blocks = [one.num_gpu_blocks for one in sizes if one.num_gpu_blocks is not None]
        tokens = [one.capacity_tokens for one in sizes if one.capacity_tokens is not None]
        return cls(sum(blocks) if blocks else None, sum(tokens) if tokens else None)


@dataclass(frozen=True)
class PlacementChange:
    """What a front end is told of a change; `placements`: mixers by layer, from every worker.

    `is_busy`: requests run, so nothing was changed. `memory`: what each replica has from now on.
    """

    is_busy: bool
    placements: list[dict[int, str]]
    memory: list[MemorySize] = field(default_factory=list)


def show_placement(vllm_config: VllmConfig, placement: Placement, change: PlacementChange) -> None:
    """From now on the configuration describes another placement."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    assert model is not None
    model.placement = as_text(placement)
    cache.num_gpu_blocks, cache.capacity_tokens = MemorySize.of_all(change.memory)


def placement_to_admit(model: ModelConfig, request: EngineCoreRequest) -> Placement | None:
    """What the core has to be asked about before it gets the request: a placement that is no
    alias."""
    placement = request.sampling_params.placement
    if isinstance(placement, str) and placement in model.placement_aliases:
        return None
    return placement
