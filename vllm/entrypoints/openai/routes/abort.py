# SPDX-License-Identifier: Apache-2.0
"""`/abort_requests`: ending requests from another connection."""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator

from vllm.entrypoints.openai.protocol.base import RequestModel
from vllm.entrypoints.openai.protocol.sampling import as_list
from vllm.entrypoints.openai.routes.common import body_schema, parse_body
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


class AbortRequest(RequestModel):
    """The `id` of one reply or of several."""

    request_ids: Annotated[list[str], BeforeValidator(as_list)]


@router.post("/abort_requests", openapi_extra=body_schema(AbortRequest))
async def abort_requests(request: Request) -> Response:
    """End requests with finish reason "abort"; ids that are not running are ignored."""
    body = await parse_body(request, AbortRequest)
    await server_of(request).siblings.abort(body.request_ids)
    return Response()
