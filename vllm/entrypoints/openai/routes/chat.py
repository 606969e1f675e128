# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` and its render route."""

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.routes.common import body_schema, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """The next message of a conversation."""
    return await respond(request, ChatCompletionRequest, server_of(request).chat.create)


@router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatCompletionRequest))
async def render_chat_completion(request: Request) -> Response:
    """Token ids and parameters of a conversation, without generating."""
    handler = server_of(request).render.render_chat
    return await respond(request, ChatCompletionRequest, handler)
