# SPDX-License-Identifier: Apache-2.0
"""The render routes: what a request would send to the engine, without generating."""

import msgspec

from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.protocol.tokenize import RenderResponse
from vllm.entrypoints.openai.serving_chat import ServingChat
from vllm.entrypoints.openai.serving_completion import ServingCompletion
from vllm.entrypoints.openai.serving_engine import Planned, RequestContext


class ServingRender:
    """Plans requests exactly as the generating routes do and shows the plan."""

    def __init__(self, completion: ServingCompletion, chat: ServingChat) -> None:
        self.completion = completion
        self.chat = chat

    async def render_chat(
        self, request: ChatCompletionRequest, context: RequestContext
    ) -> RenderResponse:
        """Token ids and parameters of a conversation."""
        model = self.chat.models.check(request.model)
        planned = await self.chat.plan(request, context.base_id(request.request_id))
        return _shown(request, planned, model)

    async def render_completion(
        self, request: CompletionRequest, context: RequestContext
    ) -> list[RenderResponse]:
        """Token ids and parameters of each prompt."""
        model = self.completion.models.check(request.model)
        planned = await self.completion.plan(request, context.base_id(request.request_id))
        return [_shown(request, one, model) for one in planned]


def _shown(request: GenerationRequest, planned: Planned, model: str) -> RenderResponse:
    options = request.stream_options
    return RenderResponse(
        request_id=planned.request_id,
        token_ids=planned.prompt.token_ids,
        sampling_params=msgspec.to_builtins(planned.params, str_keys=True),
        model=model,
        stream=bool(request.stream),
        stream_options=options.model_dump() if options else None,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        kv_transfer_params=request.kv_transfer_params,
    )
