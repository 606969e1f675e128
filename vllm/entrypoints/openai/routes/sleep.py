# SPDX-License-Identifier: Apache-2.0
"""Sleep routes, mounted with VLLM_SERVER_DEV_MODE=1 only; they need --enable-sleep-mode."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
    """Free the device memory: level 1 keeps the weights on the host, level 2 drops them.

    `mode` "abort" ends running requests, "wait" lets them finish. New ones get 503.
    """
    await server_of(request).siblings.sleep(level, mode)
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Bring back `weights`, `kv_cache`, or everything."""
    await server_of(request).siblings.wake_up(tags)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether any part of the engine sleeps."""
    return {"is_sleeping": await server_of(request).engine.is_sleeping()}
