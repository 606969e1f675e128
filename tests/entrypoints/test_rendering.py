# SPDX-License-Identifier: Apache-2.0
"""The threads that template and tokenise."""

from __future__ import annotations

import asyncio
import threading

import pytest

from vllm.entrypoints.openai.rendering import ChatTemplateOptions, PromptRenderer


@pytest.mark.asyncio
@pytest.mark.parametrize("num_threads", [1, 2])
async def test_number_of_threads(num_threads: int) -> None:
    """Two jobs that wait for each other meet only if there are two threads."""
    renderer = PromptRenderer(None, 8, 8, ChatTemplateOptions(), num_threads=num_threads)
    barrier = threading.Barrier(2)

    def meet() -> bool:
        try:
            barrier.wait(timeout=0.2 if num_threads == 1 else 120)
        except threading.BrokenBarrierError:
            return False
        return True

    try:
        met = await asyncio.gather(renderer.run(meet), renderer.run(meet))
    finally:
        renderer.close()
    assert met == [num_threads == 2] * 2
