# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai import logprobs as lp
from vllm.entrypoints.openai.chat_stream import ChatStream
from vllm.entrypoints.openai.protocol.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)
from vllm.entrypoints.openai.sampling import build_sampling_params, resolve_max_tokens
from vllm.entrypoints.openai.serving_engine import (
    OpenAIServing,
    Planned,
    RequestContext,
    now,
    total_cached,
)

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class ServingChat(OpenAIServing):
    """A conversation in, the next message out."""

    async def create(
        self, request: ChatCompletionRequest, context: RequestContext
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
        """The reply, or its stream of events; raises before anything reaches the engine."""
        model = self.models.check(request.model)
        request.check_tools()
        planned = await self.plan(request, context.base_id(request.request_id))
        source = self.generate([planned], request, context)
        if request.stream:
            return ChatStream(self, request, model, planned).events(source)
        created = now()
        *_, output = [output async for _, output in source]
        prompt_ids = planned.prompt.token_ids
        completions = sorted(output.outputs, key=lambda one: one.index)
        asked_prompt = request.prompt_logprobs is not None
        return ChatCompletionResponse(
            id=planned.request_id,
            created=created,
            model=model,
            choices=[self._choice(request, completion) for completion in completions],
            usage=self.usage(
                len(prompt_ids),
                sum(len(completion.token_ids) for completion in completions),
                total_cached([output]),
            ),
            prompt_logprobs=lp.prompt_logprobs(output.prompt_logprobs) if asked_prompt else None,
            prompt_token_ids=prompt_ids if request.return_token_ids else None,
            kv_transfer_params=output.kv_transfer_params,
        )

    async def plan(self, request: ChatCompletionRequest, base_id: str) -> Planned:
        """Validate, apply the template, tokenise and derive the engine's parameters."""
        request.check_supported()
        self.check_fan_out(1, request.num_choices)
        requested = request.requested_max_tokens
        hide_tools = (
            request.tool_choice == "none" and self.renderer.options.hide_tools_when_choice_none
        )
        prompt = await self.renderer.chat_prompt(
            request,
            truncate=request.truncate_prompt_tokens,
            max_output_tokens=requested or 1,
            hide_tools=hide_tools,
        )
        max_tokens = resolve_max_tokens(
            requested,
            None,
            len(prompt.token_ids),
            self.models.max_model_len,
            self.options.sampling_defaults.get("max_tokens"),
        )
        params = build_sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            defaults=self.options.sampling_defaults,
            detokenize=True,
        )
        return Planned(f"chatcmpl-{base_id}", prompt, params)

    def role(self, request: ChatCompletionRequest) -> str:
        """The role of the reply: the server's, or the last message's when that is continued."""
        if request.add_generation_prompt or not request.messages:
            return self.options.response_role
        return str(request.messages[-1].get("role"))

    def echoed(self, request: ChatCompletionRequest) -> str:
        """With `echo`, the text of the last message when the reply has the same role."""
        last = request.messages[-1]
        if not request.echo or last.get("role") != self.role(request):
            return ""
        content = last.get("content")
        return content if isinstance(content, str) else ""

    def logprobs(
        self, request: ChatCompletionRequest, completion: CompletionOutput
    ) -> dict[str, Any] | None:
        """Logprobs of the tokens in `completion`, None unless asked for."""
        if not request.logprobs:
            return None
        return lp.chat_logprobs(
            completion.token_ids,
            completion.logprobs or (),
            num_top=request.top_logprobs or 0,
            as_ids=self.tokens_as_ids(request),
        )

    def _choice(self, request: ChatCompletionRequest, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=ChatMessage(
                role=self.role(request), content=self.echoed(request) + completion.text
            ),
            logprobs=self.logprobs(request, completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=list(completion.token_ids) if request.return_token_ids else None,
        )
