# SPDX-License-Identifier: Apache-2.0
"""Development routes, mounted with VLLM_SERVER_DEV_MODE=1 only: they can change the engine."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response

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
    """Results of the method, one per worker; what is not JSON comes back as its `str`."""
    body = await parse_body(request, CollectiveRpcRequest)
    results = await server_of(request).engine.collective_rpc(
        body.method, timeout=body.timeout, args=tuple(body.args), kwargs=body.kwargs
    )
    plain = (str, int, float, bool, list, dict, type(None))
    return {"results": [r if isinstance(r, plain) else str(r) for r in results]}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix; refused while requests hold blocks."""
    if not await server_of(request).engine.reset_prefix_cache():
        raise APIError(
            HTTPStatus.CONFLICT, "Conflict", "the prefix cache is in use by running requests"
        )
    return Response(status_code=HTTPStatus.OK)


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, str]:
    """The engine's configuration as text."""
    return {"vllm_config": str(server_of(request).engine.vllm_config)}
