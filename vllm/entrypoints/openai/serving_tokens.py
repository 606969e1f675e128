# SPDX-License-Identifier: Apache-2.0
"""`/inference/v1/generate`: what a render route prepared, generated without any text."""

from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from vllm.entrypoints.openai import logprobs as lp
from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.protocol.token_generate import (
    SAMPLING_FIELDS,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenChoice,
    TokenGenerateRequest,
    TokenGenerateResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.rendering import PromptRenderer, RenderedPrompt
from vllm.entrypoints.openai.reply_stream import ReplyStream
from vllm.entrypoints.openai.sampling import resolve_max_tokens
from vllm.entrypoints.openai.serving_engine import OpenAIServing, Planned, RequestContext
from vllm.entrypoints.openai.serving_models import ServingModels
from vllm.entrypoints.openai.streaming import event
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import INTERNAL_FIELDS, RequestOutputKind, SamplingParams


class ServingTokens(OpenAIServing):
    """Token ids and engine parameters in, token ids out."""

    async def create(
        self, request: TokenGenerateRequest, context: RequestContext
    ) -> bytes | AsyncGenerator[bytes, None]:
        """The encoded reply, or its stream of events; raises before anything reaches the engine."""
        self.models.check(request.model)
        params = self._params(request)
        params.placement = self.models.placement(request.model, params.placement)
        self.limits.check_sequences(1, params.n)
        self.limits.check_sampling(params)
        self.limits.check_constraint("sampling_params", params.structured_outputs)
        request_id = context.base_id(request.request_id)
        planned = Planned(request_id, RenderedPrompt(request.token_ids), params)
        scheduling = GenerationRequest(
            priority=request.priority,
            cache_salt=request.cache_salt,
            stream=request.stream,
            stream_options=request.stream_options,
        )
        scheduling.check_supported()
        source = self.generate([planned], scheduling, context)
        if request.stream:
            return _TokenStream(self, scheduling, planned).events(source)
        *_, output = [output async for _, output in source]
        return await self.build([output], partial(self._reply, request_id, params, output))

    def _reply(self, request_id: str, params: SamplingParams, output: RequestOutput) -> bytes:
        reply = TokenGenerateResponse(
            request_id=request_id,
            choices=[_choice(params, one) for one in output.outputs],
            prompt_logprobs=lp.prompt_logprobs(output.prompt_logprobs),
            kv_transfer_params=output.kv_transfer_params,
        )
        return reply.model_dump_json().encode()

    def _params(self, request: TokenGenerateRequest) -> SamplingParams:
        if request.features:
            refuse("features", "features belong to images, audio or video; only text is supported")
        if not request.token_ids:
            refuse("token_ids", "the prompt has no tokens")
        given = request.sampling_params
        for name in INTERNAL_FIELDS:
            if given.get(name) is not None:
                refuse("sampling_params", f"sampling_params.{name} is filled in by the engine")
        fields = {name: value for name, value in given.items() if name in SAMPLING_FIELDS}
        try:
            params = msgspec.convert(fields, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            refuse("sampling_params", f"sampling_params: {error}")
        if request.stream and params.prompt_logprobs is not None:
            refuse("sampling_params", "prompt_logprobs are not available with stream=true")
        params.max_tokens = resolve_max_tokens(
            params.max_tokens, None, len(request.token_ids), self.models.max_model_len, None
        )
        if request.kv_transfer_params is not None:
            connector = {"kv_transfer_params": request.kv_transfer_params}
            params.extra_args = {**(params.extra_args or {}), **connector}
        # Stop strings are text; without them nothing needs to be decoded.
        params.detokenize = bool(params.stop) and self.renderer.tokenizer is not None
        params.output_kind = (
            RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        )
        return params


class _TokenStream(ReplyStream):
    """One chunk of each output."""

    def __init__(
        self, serving: ServingTokens, request: GenerationRequest, planned: Planned
    ) -> None:
        head = {"request_id": planned.request_id}
        super().__init__(serving, request, [len(planned.prompt.token_ids)], head)
        self._params = planned.params

    def _events(self, prompt_index: int, output: RequestOutput) -> bytes:
        self._num_generated += sum(len(one.token_ids) for one in output.outputs)
        chunk = self._chunk([_choice(self._params, one).model_dump() for one in output.outputs])
        if output.kv_transfer_params is not None:
            chunk["kv_transfer_params"] = output.kv_transfer_params
        return event(chunk)


def _choice(params: SamplingParams, completion: CompletionOutput) -> TokenChoice:
    logprobs = None
    if params.logprobs is not None:
        logprobs = lp.chat_logprobs(
            completion.token_ids,
            completion.logprobs or (),
            num_top=params.logprobs,
            as_ids=True,
            tokenizer=None,
        )
    return TokenChoice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


class ServingTokenization:
    """Shows how a text or a conversation becomes token ids, and back."""

    def __init__(self, models: ServingModels, renderer: PromptRenderer) -> None:
        self.models = models
        self.renderer = renderer

    async def tokenize(self, request: TokenizeRequest, context: RequestContext) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        self.models.check(request.model)
        if (request.prompt is None) == (not request.messages):
            raise VLLMValidationError("give either prompt or messages", parameter="prompt")
        if request.prompt is not None:
            prompt = await self.renderer.completion_prompt(
                request.prompt, add_special_tokens=request.add_special_tokens is not False
            )
        else:
            prompt = await self.renderer.chat_prompt(request)
        tokenizer = self.renderer.require_tokenizer("prompt")
        ids = prompt.token_ids
        pieces = None
        if request.return_token_strs:
            pieces = list(await self.renderer.run(tokenizer.convert_ids_to_tokens, ids))
        return TokenizeResponse(
            count=len(ids),
            max_model_len=self.models.max_model_len,
            tokens=ids,
            token_strs=pieces,
        )

    async def detokenize(
        self, request: DetokenizeRequest, context: RequestContext
    ) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""
        self.models.check(request.model)
        return DetokenizeResponse(prompt=await self.renderer.decode(request.tokens, False))
