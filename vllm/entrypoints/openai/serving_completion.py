# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from vllm.entrypoints.openai import logprobs as lp
from vllm.entrypoints.openai.completion_stream import CompletionStream, Echo, prompt_offsets
from vllm.entrypoints.openai.protocol.completion import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Prompt,
)
from vllm.entrypoints.openai.protocol.token_generate import RenderResponse
from vllm.entrypoints.openai.rendering import RenderedPrompt
from vllm.entrypoints.openai.sampling import build_sampling_params, resolve_max_tokens
from vllm.entrypoints.openai.serving_engine import (
    OpenAIServing,
    Planned,
    RequestContext,
    cache_report,
    now,
    shown_plan,
    total_cached,
    total_drafts,
)
from vllm.entrypoints.openai.streaming import EventSource
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput, join_kv_transfer_params
from vllm.sampling_params import SamplingParams

#: what the OpenAI API gives when `max_tokens` is not set
_DEFAULT_MAX_TOKENS = 16


class ServingCompletion(OpenAIServing):
    """Text or token ids in, text or token ids out; several prompts per request."""

    async def create(
        self, request: CompletionRequest, context: RequestContext
    ) -> bytes | EventSource:
        """The encoded reply, or its stream of events; raises before anything reaches the engine."""
        model = self.models.check(request.model)
        base_id = context.base_id(request.request_id)
        planned = await self.plan(request, base_id)
        echoed = await self._echoes(request, planned)
        if request.stream:
            stream = CompletionStream(self, request, f"cmpl-{base_id}", model, planned, echoed)
            source = self.generate(planned, request, context, stream.take_text)
            return EventSource(stream.events(source), outlet=stream.outlet)
        created = now()
        finals: dict[int, RequestOutput] = {}
        async for index, output in self.generate(planned, request, context):
            finals[index] = output
        outputs = [finals[index] for index in range(len(planned))]

        def reply() -> bytes:
            made = self._reply(request, f"cmpl-{base_id}", created, model, planned, echoed, outputs)
            return made.model_dump_json().encode()

        return await self.build(outputs, reply)

    async def plan(self, request: CompletionRequest, base_id: str) -> list[Planned]:
        """Validate, tokenise and give every prompt its parameters and engine-side id."""
        request.check_supported()
        prompts = request.prompts
        if not prompts:
            raise VLLMValidationError("prompt must not be empty", parameter="prompt")
        self.limits.check_sequences(len(prompts), request.num_choices)
        self.limits.check_sampling(request)
        self.limits.check_checkpoints(request.cache_checkpoints)
        rendered = await asyncio.gather(*(self._render(request, prompt) for prompt in prompts))
        params = functools.cache(functools.partial(self._params, request))
        return [
            Planned(
                f"cmpl-{base_id}-{index}",
                prompt,
                params(self._max_tokens(request, len(prompt.token_ids))),
            )
            for index, prompt in enumerate(rendered)
        ]

    async def render(
        self, request: CompletionRequest, context: RequestContext
    ) -> list[RenderResponse]:
        """Token ids and parameters of each prompt, without generating."""
        model = self.models.check(request.model)
        planned = await self.plan(request, context.base_id(request.request_id))
        return [shown_plan(request, one, model) for one in planned]

    async def _render(self, request: CompletionRequest, prompt: Prompt) -> RenderedPrompt:
        rendered = await self.renderer.completion_prompt(
            prompt,
            add_special_tokens=request.add_special_tokens is not False,
            truncation=self.truncation(request, request.max_tokens),
        )
        if not rendered.token_ids:
            raise VLLMValidationError("the prompt has no tokens", parameter="prompt")
        return rendered

    def _max_tokens(self, request: CompletionRequest, num_prompt_tokens: int) -> int:
        """Raises `VLLMValidationError` when prompt and output do not fit the context."""
        max_tokens = resolve_max_tokens(
            request.max_tokens,
            _DEFAULT_MAX_TOKENS,
            num_prompt_tokens,
            self.models.max_model_len,
            self.options.sampling_defaults.get("max_tokens"),
        )
        # The engine always generates; for max_tokens 0 that one token is dropped from the reply.
        return 1 if request.max_tokens == 0 else max_tokens

    def _params(self, request: CompletionRequest, max_tokens: int) -> SamplingParams:
        prompt_logprobs = request.prompt_logprobs
        if request.echo and prompt_logprobs is None:
            prompt_logprobs = request.logprobs
        params = build_sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
            defaults=self.options.sampling_defaults,
            placement=self.models.placement(request.model, request.placement),
            detokenize=self.renderer.tokenizer is not None,
        )
        field = request.field_names().get("structured_outputs", "structured_outputs")
        self.limits.check_constraint(field, params.structured_outputs)
        return params

    async def _echoes(self, request: CompletionRequest, planned: list[Planned]) -> list[Echo]:
        """What to put before the outputs of each prompt."""
        if not request.echo:
            return [Echo()] * len(planned)

        tokenizer = self.renderer.tokenizer

        async def echo(prompt: RenderedPrompt) -> Echo:
            if tokenizer is None:
                return Echo("", [0] * len(prompt.token_ids))
            if prompt.text is not None and request.truncate_prompt_tokens is None:
                text = prompt.text
            else:
                text = await self.renderer.decode(
                    prompt.token_ids, request.skip_special_tokens is not False, "prompt"
                )
            if request.logprobs is None:
                return Echo(text)
            return Echo(
                text,
                await self.renderer.run(prompt_offsets, tokenizer, prompt.token_ids, text),
            )

        return list(await asyncio.gather(*(echo(one.prompt) for one in planned)))

    def _reply(
        self,
        request: CompletionRequest,
        reply_id: str,
        created: int,
        model: str,
        planned: list[Planned],
        echoed: Sequence[Echo],
        outputs: list[RequestOutput],
    ) -> CompletionResponse:
        ordered = [
            (index, completion)
            for index, output in enumerate(outputs)
            for completion in sorted(output.outputs, key=lambda one: one.index)
        ]
        choices = [
            self._choice(
                request,
                index * request.num_choices + completion.index,
                planned[index],
                echoed[index],
                outputs[index],
                completion,
            )
            for index, completion in ordered
        ]
        completions = [completion for _, completion in ordered]
        generated = sum(len(completion.token_ids) for completion in completions)
        return CompletionResponse(
            id=reply_id,
            created=created,
            model=model,
            choices=choices,
            usage=self.usage(
                sum(len(one.prompt.token_ids) for one in planned),
                0 if request.max_tokens == 0 else generated,
                total_cached(outputs),
                total_drafts(completions),
            ),
            kv_transfer_params=join_kv_transfer_params(completions),
            cache_report=cache_report(outputs[0]),
        )

    def _choice(
        self,
        request: CompletionRequest,
        index: int,
        planned: Planned,
        echo: Echo,
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> CompletionChoice:
        prompt_ids = planned.prompt.token_ids
        token_ids, positions = list(completion.token_ids), list(completion.logprobs or ())
        text, finish_reason, stop_reason = (
            completion.text,
            completion.finish_reason,
            completion.stop_reason,
        )
        if request.max_tokens == 0:
            token_ids, positions, text, finish_reason, stop_reason = [], [], "", "length", None
        logprobs = None
        if request.logprobs is not None:
            shown = prompt_ids + token_ids if request.echo else token_ids
            before = output.prompt_logprobs or () if request.echo else ()
            where: list[lp.Position | None] = [*before, *positions]
            after = echo.then(self.renderer.tokenizer, prompt_ids, planned.params)
            logprobs = lp.completion_logprobs(
                shown,
                where,
                as_ids=self.tokens_as_ids(request),
                decode=self.decode_token,
                offsets=[*echo.offsets, *after.of(token_ids)],
            )
        asked_ids = bool(request.return_token_ids)
        asked_prompt = request.prompt_logprobs is not None
        return CompletionChoice(
            index=index,
            text=echo.text + text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=token_ids if asked_ids else None,
            prompt_token_ids=prompt_ids if asked_ids else None,
            prompt_logprobs=lp.prompt_logprobs(output.prompt_logprobs) if asked_prompt else None,
        )
