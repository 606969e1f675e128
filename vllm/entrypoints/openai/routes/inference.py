# SPDX-License-Identifier: Apache-2.0
"""`/inference/v1/generate`."""

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.openai.protocol.token_generate import TokenGenerateRequest
from vllm.entrypoints.openai.routes.common import body_schema, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/inference/v1/generate", openapi_extra=body_schema(TokenGenerateRequest))
async def generate_tokens(request: Request) -> Response:
    """Continue token ids; the body is what the render routes reply with."""
    return await respond(request, TokenGenerateRequest, server_of(request).tokens.create)
