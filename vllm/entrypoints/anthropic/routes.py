# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages` and `/v1/messages/count_tokens`."""

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.openai.routes.common import body_schema, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def create_message(request: Request) -> Response:
    """The next message of a conversation."""
    return await respond(request, MessagesRequest, server_of(request).messages.create)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message request has."""
    return await respond(request, CountTokensRequest, server_of(request).messages.count)
