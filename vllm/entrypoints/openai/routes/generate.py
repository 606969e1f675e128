# SPDX-License-Identifier: Apache-2.0
"""The routes that generate, end that, and show what a request would send to the engine."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator

from vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.openai.protocol.base import RequestModel
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.protocol.sampling import as_list
from vllm.entrypoints.openai.protocol.token_generate import (
    DetokenizeRequest,
    TokenGenerateRequest,
    TokenizeRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.routes.common import body_schema, parse_body, respond
from vllm.entrypoints.openai.state import server_of

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue each prompt."""
    return await respond(request, CompletionRequest, server_of(request).completion.create)


@router.post("/v1/completions/render", openapi_extra=body_schema(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """Token ids and parameters of each prompt, without generating."""
    return await respond(request, CompletionRequest, server_of(request).completion.render)


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """The next message of a conversation."""
    return await respond(request, ChatCompletionRequest, server_of(request).chat.create)


@router.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatCompletionRequest))
async def render_chat_completion(request: Request) -> Response:
    """Token ids and parameters of a conversation, without generating."""
    return await respond(request, ChatCompletionRequest, server_of(request).chat.render)


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """The next items of a conversation."""
    return await respond(request, ResponsesRequest, server_of(request).responses.create)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response request has."""
    return await respond(request, ResponsesRequest, server_of(request).responses.count)


@router.post("/inference/v1/generate", openapi_extra=body_schema(TokenGenerateRequest))
async def generate_tokens(request: Request) -> Response:
    """Continue token ids; the body is what the render routes reply with."""
    return await respond(request, TokenGenerateRequest, server_of(request).tokens.create)


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def create_message(request: Request) -> Response:
    """The next message of a conversation."""
    return await respond(request, MessagesRequest, server_of(request).messages.create)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message request has."""
    return await respond(request, CountTokensRequest, server_of(request).messages.count)


class AbortRequest(RequestModel):
    """The `id` of one reply or of several."""

    request_ids: Annotated[list[str], BeforeValidator(as_list)]


@router.post("/abort_requests", openapi_extra=body_schema(AbortRequest))
async def abort_requests(request: Request) -> Response:
    """End requests with finish reason "abort"; ids that are not running are ignored."""
    body = await parse_body(request, AbortRequest)
    await server_of(request).siblings.abort(body.request_ids)
    return Response()


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
    """Class, size and chat template of the tokenizer, and its special tokens under the keys that
    they have in `tokenizer_config.json`, where remote tokenizers look for them."""
    renderer = server_of(request).renderer
    tokenizer = renderer.require_tokenizer("tokenizer")
    return {
        **{name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "chat_template": renderer.options.chat_template or tokenizer.chat_template,
    }
