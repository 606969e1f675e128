# SPDX-License-Identifier: Apache-2.0
"""Everything the routes of one server share."""

from dataclasses import dataclass

from starlette.requests import Request

from vllm import envs
from vllm.entrypoints.anthropic.serving import ServingMessages
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.openai.chat_reply import ChatParsers
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.middleware import LoadCounter
from vllm.entrypoints.openai.rendering import ChatTemplateOptions, PromptRenderer
from vllm.entrypoints.openai.request_limits import RequestLimits
from vllm.entrypoints.openai.responses.serving import ServingResponses
from vllm.entrypoints.openai.serving_chat import ServingChat
from vllm.entrypoints.openai.serving_completion import ServingCompletion
from vllm.entrypoints.openai.serving_engine import RequestLog, ServingOptions
from vllm.entrypoints.openai.serving_models import ServingModels
from vllm.entrypoints.openai.serving_tokens import ServingTokenization, ServingTokens
from vllm.entrypoints.openai.siblings import Alone, Siblings
from vllm.entrypoints.tally import Counted, Tallies
from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Server:
    """The engine and one serving object per concern."""

    engine: AsyncLLM
    renderer: PromptRenderer
    models: ServingModels
    completion: ServingCompletion
    chat: ServingChat
    responses: ServingResponses
    messages: ServingMessages
    tokenization: ServingTokenization
    tokens: ServingTokens
    load: LoadCounter
    siblings: Siblings
    #: seconds a request may take, None for no limit
    request_timeout_s: float | None = None


def make_server(
    engine: AsyncLLM, args: FrontEndArgs, siblings: Siblings | None, tallies: Tallies
) -> Server:
    """Wire the serving objects to `engine` as `args` says; without `siblings` it serves alone."""
    model_config = engine.model_config
    models = ServingModels(
        model_config.served_names,
        model_config.model,
        model_config.max_model_len,
        model_config.placement_aliases,
    )
    content_format = args.chat_template_content_format
    limits = RequestLimits.from_flag(args.request_limits)
    renderer = PromptRenderer(
        engine.get_tokenizer(),
        model_config.max_model_len,
        model_config.get_vocab_size(),
        ChatTemplateOptions(
            chat_template=load_chat_template(args.chat_template),
            content_format=None if content_format == "auto" else content_format,
            trust_request_template=args.trust_request_chat_template,
            default_kwargs=args.default_chat_template_kwargs,
            hide_tools_when_choice_none=args.exclude_tools_when_tool_choice_none,
            mark_preambles=model_config.is_hybrid,
        ),
        limits,
        args.renderer_num_workers,
    )
    options = ServingOptions(
        limits=limits,
        response_role=args.response_role,
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
        prompt_tokens_details=args.enable_prompt_tokens_details,
        force_include_usage=args.enable_force_include_usage,
        sampling_defaults=model_config.get_diff_sampling_param(),
        log=RequestLog(
            requests=args.enable_log_requests,
            outputs=args.enable_log_outputs or envs.VLLM_DEBUG_LOG_API_SERVER_RESPONSE,
            max_len=args.max_log_len,
        ),
    )
    completion = ServingCompletion(engine, models, renderer, options)
    chat = ServingChat(engine, models, renderer, options, ChatParsers.from_args(args))
    return Server(
        engine=engine,
        renderer=renderer,
        models=models,
        completion=completion,
        chat=chat,
        responses=ServingResponses(chat),
        messages=ServingMessages(chat),
        tokenization=ServingTokenization(models, renderer),
        tokens=ServingTokens(engine, models, renderer, options),
        load=LoadCounter(tallies.of(Counted.LOAD)),
        siblings=siblings or Alone(engine, renderer),
        request_timeout_s=args.request_timeout,
    )


def server_of(request: Request) -> Server:
    """The server that a request belongs to."""
    return request.app.state.server
