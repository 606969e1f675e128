# SPDX-License-Identifier: Apache-2.0
"""Development routes, mounted with VLLM_SERVER_DEV_MODE=1 only: they can change the engine.

Those about sleep need --enable-sleep-mode.
"""

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_jsonable_python

from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.protocol.base import Number, RequestModel
from vllm.entrypoints.openai.routes.common import body_schema, parse_body
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


class CollectiveRpcRequest(RequestModel):
    """A method to call on every worker."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Number | None = None


@router.post("/collective_rpc", openapi_extra=body_schema(CollectiveRpcRequest))
async def collective_rpc(request: Request) -> dict[str, list[Any]]:
    """Results of the method, one per worker; what is not JSON comes back as its `str`.

    400 for a method that the workers have not.
    """
    body = await parse_body(request, CollectiveRpcRequest)
    results = await server_of(request).engine.collective_rpc(
        body.method, timeout=body.timeout, args=tuple(body.args), kwargs=body.kwargs
    )
    plain = (str, int, float, bool, list, tuple, dict, type(None))
    shown = [r if isinstance(r, plain) else str(r) for r in results]
    return {"results": to_jsonable_python(shown, fallback=str)}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Forget every cached prefix; refused while requests hold blocks."""
    engine = server_of(request).engine
    if not await engine.reset_prefix_cache(reset_running_requests, reset_external):
        raise APIError(
            HTTPStatus.CONFLICT, "Conflict", "the prefix cache is in use by running requests"
        )
    return Response(status_code=HTTPStatus.OK)


@router.get("/server_info")
async def server_info(
    request: Request, config_format: Literal["text", "json"] = "text"
) -> dict[str, Any]:
    """The engine's configuration as text, or as JSON; without the Hugging Face token."""
    config = server_of(request).engine.vllm_config
    described = to_jsonable_python(config, fallback=str)
    if described["model_config"].get("hf_token"):
        described["model_config"]["hf_token"] = "***"
    if config_format == "text":
        return {"vllm_config": "\n".join(f"{key}: {value}" for key, value in described.items())}
    return {"vllm_config": described}


@router.get("/get_world_size")
async def get_world_size(request: Request) -> dict[str, int]:
    """How many workers the engine has, over all replicas."""
    parallel = server_of(request).engine.vllm_config.parallel_config
    return {"world_size": parallel.world_size * len(parallel.local_ranks)}


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
