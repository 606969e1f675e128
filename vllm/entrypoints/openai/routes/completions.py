# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions` and its render route."""

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.routes.common import body_schema, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue each prompt."""
    return await respond(request, CompletionRequest, server_of(request).completion.create)


@router.post("/v1/completions/render", openapi_extra=body_schema(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """Token ids and parameters of each prompt, without generating."""
    handler = server_of(request).render.render_completion
    return await respond(request, CompletionRequest, handler)
