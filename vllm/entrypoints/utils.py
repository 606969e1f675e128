# SPDX-License-Identifier: Apache-2.0
"""Small helpers of the front end."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")

#: leaves room for `chatcmpl-` and a prompt index within the 128 characters of an engine-side id
_MAX_ID_LENGTH = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def most_running(vllm_config: "VllmConfig") -> int:
    """Requests that the steps of all replicas of this server hold at once."""
    num_replicas = len(vllm_config.parallel_config.local_ranks)
    return vllm_config.scheduler_config.max_num_seqs * num_replicas


def safe_id(text: str | None) -> str:
    """Client text as an id made of `[A-Za-z0-9._-]`, at most 100 long; random when there is none.

    Ids end up in file names of connectors, so no separators may pass, nor a leading dot.
    """
    cleaned = _UNSAFE.sub("_", text or "")[:_MAX_ID_LENGTH].lstrip(".")
    return cleaned or uuid.uuid4().hex


def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all `sources` as they come.

    The first failure ends the merge. Closing the merge closes every source.
    """
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await source.aclose()

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    running = len(pumps)
    try:
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, BaseException):
                raise entry
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
