# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.entrypoints.chat_utils import message_text
from vllm.entrypoints.openai import logprobs as lp
from vllm.entrypoints.openai.chat_reply import (
    ChatParsers,
    ReplySplitter,
    call_object,
    make_splitter,
)
from vllm.entrypoints.openai.chat_stream import ChatStream
from vllm.entrypoints.openai.protocol.base import refuse, renamed
from vllm.entrypoints.openai.protocol.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)
from vllm.entrypoints.openai.protocol.token_generate import RenderResponse
from vllm.entrypoints.openai.rendering import PromptRenderer, RenderedPrompt
from vllm.entrypoints.openai.sampling import build_sampling_params, resolve_max_tokens
from vllm.entrypoints.openai.serving_engine import (
    OpenAIServing,
    Planned,
    RequestContext,
    ServingOptions,
    cache_report,
    now,
    shown_plan,
    total_cached,
    total_drafts,
)
from vllm.entrypoints.openai.serving_models import ServingModels
from vllm.entrypoints.openai.streaming import EventSource
from vllm.entrypoints.openai.tool_choice import ToolChoice, only_allowed, resolve_tool_choice
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning import ReasoningParser
from vllm.sampling_params import ReasoningBudget, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output.validation import check_form


@dataclass(frozen=True)
class PlannedChat(Planned):
    """A conversation ready for the engine."""

    choice: ToolChoice


class ServingChat(OpenAIServing):
    """A conversation in, the next message out."""

    def __init__(
        self,
        engine: AsyncLLM,
        models: ServingModels,
        renderer: PromptRenderer,
        options: ServingOptions,
        parsers: ChatParsers,
    ) -> None:
        super().__init__(engine, models, renderer, options)
        self.parsers = parsers
        tokenizer = renderer.tokenizer
        self._special_tokens = frozenset(tokenizer.all_special_tokens if tokenizer else ())

    async def create(
        self, request: ChatCompletionRequest, context: RequestContext
    ) -> bytes | EventSource:
        """The encoded reply, or its stream of events; raises before anything reaches the engine."""
        model, planned = await self.begin(request, context)
        if request.stream:
            stream = ChatStream(
                self,
                request,
                planned,
                model,
                splitters=[self.splitter(request, planned) for _ in range(request.num_choices)],
                role=self.role(request),
                echoed=self.echoed(request),
                logprobs=partial(self.logprobs, request),
            )
            source = self.generate([planned], request, context, stream.take_text)
            return EventSource(stream.events(source), outlet=stream.outlet)
        created = now()
        *_, output = [output async for _, output in self.generate([planned], request, context)]

        def reply() -> bytes:
            return self._reply(request, created, model, planned, output).model_dump_json().encode()

        return await self.build([output], reply)

    def _reply(
        self,
        request: ChatCompletionRequest,
        created: int,
        model: str,
        planned: PlannedChat,
        output: RequestOutput,
    ) -> ChatCompletionResponse:
        prompt_ids = planned.prompt.token_ids
        completions = sorted(output.outputs, key=lambda one: one.index)
        asked_prompt = request.prompt_logprobs is not None
        return ChatCompletionResponse(
            id=planned.request_id,
            created=created,
            model=model,
            choices=[self._choice(request, planned, completion) for completion in completions],
            usage=self.usage(
                len(prompt_ids),
                sum(len(completion.token_ids) for completion in completions),
                total_cached([output]),
                total_drafts(completions),
            ),
            prompt_logprobs=lp.prompt_logprobs(output.prompt_logprobs) if asked_prompt else None,
            prompt_token_ids=prompt_ids if request.return_token_ids else None,
            kv_transfer_params=output.kv_transfer_params,
            cache_report=cache_report(output),
        )

    async def begin(
        self,
        request: ChatCompletionRequest,
        context: RequestContext,
        most_tokens: int | None = None,
    ) -> tuple[str, PlannedChat]:
        """The served name of the model and the plan of a request whose reply can be parsed."""
        model = self.models.check(request.model)
        planned = await self.plan(request, context.base_id(request.request_id), most_tokens)
        self.parsers.check(planned.choice)
        return model, planned

    async def prompt(
        self, request: ChatCompletionRequest, max_output_tokens: int = 1
    ) -> RenderedPrompt:
        """The conversation through the chat template, tokenised."""
        hide_tools = (
            request.tool_choice == "none" and self.renderer.options.hide_tools_when_choice_none
        )
        return await self.renderer.chat_prompt(
            request,
            truncation=self.truncation(request, max_output_tokens),
            hide_tools=hide_tools,
            mark_messages=request.cache_checkpoints == "messages",
        )

    async def plan(
        self, request: ChatCompletionRequest, base_id: str, most_tokens: int | None = None
    ) -> PlannedChat:
        """Validate, apply the template, tokenise and derive the engine's parameters.

        `most_tokens`: of a reply to a request without `max_tokens`, as far as there is room; None
        for all that there is.
        """
        try:
            return await self._plan(request, base_id, most_tokens)
        except VLLMValidationError as error:
            raise renamed(error, request.field_names()) from None

    async def _plan(
        self, request: ChatCompletionRequest, base_id: str, most_tokens: int | None
    ) -> PlannedChat:
        request.check_supported()
        self.limits.check_sequences(1, request.num_choices)
        self.limits.check_sampling(request)
        self.limits.check_checkpoints(request.cache_checkpoints)
        tools, tool_choice = only_allowed(request.tools, request.tool_choice)
        request = request.model_copy(update={"tools": tools, "tool_choice": tool_choice})
        choice = resolve_tool_choice(request)
        requested = request.requested_max_tokens
        prompt = await self.prompt(request, requested or 1)
        max_tokens = resolve_max_tokens(
            requested,
            most_tokens,
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
            placement=self.models.placement(request.model, request.placement),
        )
        self.limits.check_constraint("structured_outputs", params.structured_outputs)
        if (constraint := choice.constraint()) is not None:
            self.limits.check_constraint("tools", constraint)
            params.structured_outputs = constraint
        reasoning = self._reasoning_parser(request, prompt)
        if reasoning is not None and params.structured_outputs is not None:
            params.structured_outputs = constrain_after_reasoning(
                params.structured_outputs, reasoning, max_tokens
            )
        if self._special_tokens & self.parsers.tags(choice):
            params.skip_special_tokens = False
        return PlannedChat(f"chatcmpl-{base_id}", prompt, params, choice)

    async def render(
        self, request: ChatCompletionRequest, context: RequestContext
    ) -> RenderResponse:
        """Token ids and parameters of a conversation, without generating."""
        model = self.models.check(request.model)
        planned = await self.plan(request, context.base_id(request.request_id))
        return shown_plan(request, planned, model)

    def splitter(
        self, request: ChatCompletionRequest, planned: PlannedChat
    ) -> ReplySplitter | None:
        """What separates one reply into reasoning, content and calls; None for plain text."""
        constraint = planned.params.structured_outputs
        return make_splitter(
            self.parsers,
            planned.choice,
            self._reasoning_parser(request, planned.prompt),
            request.include_reasoning is not False,
            is_constrained=constraint is not None and constraint.reasoning is not None,
        )

    def _reasoning_parser(
        self, request: ChatCompletionRequest, prompt: RenderedPrompt
    ) -> ReasoningParser | None:
        """A parser for one reply to `prompt`, None when reasoning stays in the content."""
        if self.parsers.reasoning is None:
            return None
        continued = message_text(request.messages[-1]) if request.continue_final_message else ""
        return self.parsers.reasoning(prompt.text or "", continued)

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
        return message_text(last)

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
            tokenizer=self.renderer.tokenizer,
        )

    def _choice(
        self, request: ChatCompletionRequest, planned: PlannedChat, completion: CompletionOutput
    ) -> ChatChoice:
        message = ChatMessage(role=self.role(request), content=completion.text)
        reason = completion.finish_reason
        splitter = self.splitter(request, planned)
        if splitter is not None:
            reply = splitter.feed(completion.text, finished=True)
            message.content = reply.content
            message.reasoning = reply.reasoning or None
            message.tool_calls = [call_object(call) for call in reply.calls]
            reason = splitter.finish_reason(reason)
        message.content = self.echoed(request) + (message.content or "")
        if not message.content and (message.tool_calls or message.reasoning):
            message.content = None
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self.logprobs(request, completion),
            finish_reason=reason,
            stop_reason=completion.stop_reason,
            token_ids=list(completion.token_ids) if request.return_token_ids else None,
        )


#: tokens of a reply that reasoning leaves to the answer, at least
_ANSWER_TOKENS = 256


def reasoning_tokens(max_tokens: int) -> int:
    """How many of a constrained reply's `max_tokens` may be reasoning: what exceeds 256, at most
    half."""
    return max(0, min(max_tokens // 2, max_tokens - _ANSWER_TOKENS))


def constrain_after_reasoning(
    constraint: StructuredOutputsParams, parser: ReasoningParser, max_tokens: int
) -> StructuredOutputsParams:
    """The constraint for a whole reply of at most `max_tokens`, whose reasoning is bounded.

    The same one if the reply begins with its content. Raises `VLLMValidationError` for a structural
    tag in the older form and for what is malformed, which could not be told from the result.
    """
    check_form(constraint)
    if not parser.may_reason():
        return constraint
    bounds, allowed = parser.bounds(), reasoning_tokens(max_tokens)
    if bounds is not None and bounds[0] and not allowed:
        return constraint
    tag = {"type": "structural_tag", "format": parser.with_reasoning(_content_format(constraint))}
    return StructuredOutputsParams(
        structural_tag=json.dumps(tag),
        disable_any_whitespace=constraint.disable_any_whitespace,
        reasoning=None if bounds is None else ReasoningBudget(*bounds, allowed),
    )


def _content_format(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """The constraint in the language of structural tags."""
    if constraint.json is not None:
        return {"type": "json_schema", "json_schema": _parsed(constraint.json)}
    if constraint.json_object is not None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        options = [{"type": "const_string", "value": text} for text in constraint.choice]
        return {"type": "or", "elements": options}
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    tag = _parsed(constraint.structural_tag)
    inner = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(inner, dict):
        refuse(
            "structured_outputs",
            "with reasoning, a structural tag needs the key `format`; give it that, or switch "
            "reasoning off in chat_template_kwargs",
        )
    return inner


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
