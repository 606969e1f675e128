# SPDX-License-Identifier: Apache-2.0
"""What concerns all processes that serve one engine, whichever of them a client has reached."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from vllm.entrypoints.openai.rendering import PromptRenderer
from vllm.v1.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from vllm.model_executor.placements import Placement


class Siblings(Protocol):
    """All of them, this one included."""

    async def abort(self, reply_ids: list[str]) -> None:
        """End the requests whose replies have these ids; ids that are not running are ignored."""

    async def metrics_text(self) -> bytes:
        """The metrics of all."""

    async def sleep(self, level: int, mode: str) -> None:
        """As `AsyncLLM.sleep`, where `mode` is about the requests of all."""

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """As `AsyncLLM.wake_up`."""

    async def change_placement(self, placement: "Placement", mode: str) -> None:
        """As `AsyncLLM.change_placement`; afterwards all describe the new one."""


class Alone(Siblings):
    """The only process."""

    def __init__(self, engine: AsyncLLM, renderer: PromptRenderer) -> None:
        self._engine = engine
        self._renderer = renderer

    async def abort(self, reply_ids: list[str]) -> None:
        await abort_replies(self._engine, reply_ids)

    async def metrics_text(self) -> bytes:
        return await self._renderer.run(self._engine.metrics_text)

    async def sleep(self, level: int, mode: str) -> None:
        await self._engine.sleep(level, mode)

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        await self._engine.wake_up(None if tags is None else list(tags))

    async def change_placement(self, placement: "Placement", mode: str) -> None:
        await self._engine.change_placement(placement, mode)


async def abort_replies(engine: AsyncLLM, reply_ids: list[str]) -> None:
    """End this process's requests whose replies have these ids."""
    asked = set(reply_ids)
    running = engine.unfinished_request_ids()
    await engine.abort([one for one in running if {one, _reply_id(one)} & asked])


def _reply_id(request_id: str) -> str:
    """Each prompt of a completion has its own id: the reply's and a number."""
    return request_id.rpartition("-")[0] if request_id.startswith("cmpl-") else request_id
