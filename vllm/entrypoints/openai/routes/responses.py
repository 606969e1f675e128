# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` and the count of its input tokens."""

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.routes.common import body_schema, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """The next items of a conversation."""
    return await respond(request, ResponsesRequest, server_of(request).responses.create)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response request has."""
    return await respond(request, ResponsesRequest, server_of(request).responses.count)
