# SPDX-License-Identifier: Apache-2.0
"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from vllm.entrypoints.openai.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.openai.routes.common import body_schema, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()
info_router = APIRouter()


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation."""
    return await respond(request, TokenizeRequest, server_of(request).tokenization.tokenize)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    return await respond(request, DetokenizeRequest, server_of(request).tokenization.detokenize)


@info_router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Class, size, special tokens and chat template of the tokenizer."""
    renderer = server_of(request).renderer
    tokenizer = renderer.require_tokenizer("tokenizer")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "chat_template": renderer.options.chat_template or tokenizer.chat_template,
    }
