# SPDX-License-Identifier: Apache-2.0
"""What every serving class needs: options, ids, limits and the way to the engine."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from vllm.entrypoints.openai.protocol.base import (
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageInfo,
    renamed,
)
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.protocol.token_generate import RenderResponse
from vllm.entrypoints.openai.rendering import PromptRenderer, RenderedPrompt, Truncation
from vllm.entrypoints.openai.request_limits import RequestLimits
from vllm.entrypoints.openai.served_beams import ServedBeams
from vllm.entrypoints.openai.serving_models import ServingModels
from vllm.entrypoints.utils import merge, safe_id
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.logprobs import TokenTexts
from vllm.v1.engine.output_stream import TakeText

logger = init_logger(__name__)


@dataclass(frozen=True)
class RequestLog:
    """`max_len` bounds the characters or token ids shown; None shows everything."""

    requests: bool = False
    outputs: bool = False
    max_len: int | None = None

    def received(self, request_id: str, prompt: RenderedPrompt, params: SamplingParams) -> None:
        """Log a request on its way to the engine."""
        if self.requests:
            text = None if prompt.text is None else prompt.text[: self.max_len]
            ids = prompt.token_ids[: self.max_len]
            logger.info("received %s: prompt %r, token ids %s, %s", request_id, text, ids, params)

    def aborted(self, request_id: str) -> None:
        """Log a request that nobody waits for any more."""
        if self.requests:
            logger.info("aborted %s: its client left or its time was over", request_id)

    def produced(self, request_id: str, output: RequestOutput) -> None:
        """Log what the engine returned."""
        if self.outputs:
            for completion in output.outputs:
                logger.info(
                    "output of %s[%d]: %r, token ids %s, finish reason %s",
                    request_id,
                    completion.index,
                    completion.text[: self.max_len],
                    list(completion.token_ids[: self.max_len]),
                    completion.finish_reason,
                )


T = TypeVar("T")

#: logprobs that are made, shown and encoded in a few milliseconds, new texts included
_FEW_LOGPROBS = 256


@dataclass(frozen=True)
class ServingOptions:
    """Flags that shape replies; `sampling_defaults` come from the generation config."""

    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    prompt_tokens_details: bool = True
    force_include_usage: bool = False
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: RequestLimits = RequestLimits()
    log: RequestLog = RequestLog()


@dataclass(frozen=True)
class RequestContext:
    """What the HTTP layer knows beside the body."""

    request_id: str | None = None
    trace_headers: Mapping[str, str] | None = None
    #: the replica that the client asks for
    data_parallel_rank: int | None = None

    def base_id(self, from_body: str | None) -> str:
        """The body's id before the header's before a random one."""
        return safe_id(from_body or self.request_id)


@dataclass(frozen=True)
class Planned:
    """One prompt ready for the engine."""

    request_id: str
    prompt: RenderedPrompt
    params: SamplingParams


class OpenAIServing:
    """Base of the serving classes; reaches the engine only through `AsyncLLM`'s public methods."""

    def __init__(
        self,
        engine: AsyncLLM,
        models: ServingModels,
        renderer: PromptRenderer,
        options: ServingOptions,
    ) -> None:
        self.engine = engine
        self.models = models
        self.renderer = renderer
        self.options = options
        self.limits = options.limits
        self._texts = TokenTexts(renderer.tokenizer)

    def tokens_as_ids(self, request: GenerationRequest) -> bool:
        """Whether logprobs show `token_id:N`; the request's word counts before the server's."""
        asked = request.return_tokens_as_token_ids
        return self.options.return_tokens_as_token_ids if asked is None else asked

    def decode_token(self, token_id: int) -> str:
        """The text of one token; its id where the server has no tokenizer."""
        text = self._texts.get(token_id)
        return f"token_id:{token_id}" if text is None else text

    def truncation(self, request: GenerationRequest, max_tokens: int | None) -> Truncation:
        """How the request wants its prompt cut if it is too long."""
        return Truncation(request.truncate_prompt_tokens, request.truncation_side, max_tokens or 1)

    def generate(
        self,
        planned: list[Planned],
        request: GenerationRequest,
        context: RequestContext,
        take_text: TakeText | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, with the prompt's index.

        `take_text`: see `AsyncLLM.generate`; of a single prompt, whose outputs need no log.
        """
        if len(planned) > 1 or self.options.log.outputs:
            take_text = None
        return merge(
            [
                self._generate_one(i, one, request, context, take_text)
                for i, one in enumerate(planned)
            ]
        )

    async def _generate_one(
        self,
        index: int,
        planned: Planned,
        request: GenerationRequest,
        context: RequestContext,
        take_text: TakeText | None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        self.options.log.received(planned.request_id, planned.prompt, planned.params)
        if request.use_beam_search:
            beams = ServedBeams(self.engine, self.renderer.tokenizer, context.data_parallel_rank)
            found = await beams.search(request, planned.request_id, planned.prompt, planned.params)
            self.options.log.produced(planned.request_id, found)
            yield index, found
            return
        cache = request.cache_options(planned.prompt.marks)
        prompt: TokensPrompt = {
            "prompt_token_ids": planned.prompt.token_ids,
            "cache_checkpoints": list(cache.checkpoints),
            "cache_pin_seconds": cache.pin_seconds,
            "return_cache_report": cache.report,
        }
        if planned.prompt.text is not None:
            prompt["prompt"] = planned.prompt.text
        outputs = self.engine.generate(
            prompt,
            planned.params,
            planned.request_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            trace_headers=context.trace_headers,
            take_text=take_text,
            data_parallel_rank=context.data_parallel_rank,
        )
        try:
            async for output in outputs:
                for completion in output.outputs:
                    if completion.finish_reason == "error":
                        raise EngineGenerateError(f"request {planned.request_id} failed")
                self.options.log.produced(planned.request_id, output)
                yield index, output
        except VLLMValidationError as error:
            raise renamed(error, request.field_names()) from None
        except EngineGenerateError as error:
            logger.error("%s", error)  # it names the request
            raise
        except EngineDeadError as error:
            logger.error("request %s failed: %s", planned.request_id, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.options.log.aborted(planned.request_id)
            raise
        finally:
            await outputs.aclose()

    async def build(self, outputs: Sequence[RequestOutput], make: Callable[[], T]) -> T:
        """`make()`, which shows `outputs` to the client; in a thread if they hold many logprobs,
        which are then freed there."""
        size = sum(output.num_logprobs for output in outputs)
        if size <= _FEW_LOGPROBS:
            return make()

        def work() -> T:
            made = make()
            for output in outputs:
                output.drop_logprobs()
            return made

        return await self.renderer.run(work, size=size)

    def usage(
        self,
        num_prompt: int,
        num_completion: int,
        num_cached: int | None = None,
        num_drafts: tuple[int, int] | None = None,
    ) -> UsageInfo:
        """Token counts of a reply; `num_cached` are the prompt tokens found in the cache,
        `num_drafts` the draft tokens that were accepted and rejected."""
        details = None
        if self.options.prompt_tokens_details and num_cached is not None:
            details = PromptTokensDetails(cached_tokens=num_cached)
        return UsageInfo(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=details,
            completion_tokens_details=draft_details(num_drafts),
        )


def shown_plan(request: GenerationRequest, planned: Planned, model: str) -> RenderResponse:
    """What a render route shows: what the request would send to the engine."""
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


def draft_details(num_drafts: tuple[int, int] | None) -> CompletionTokensDetails | None:
    """`num_drafts` (accepted, rejected) as a reply shows them."""
    if num_drafts is None:
        return None
    return CompletionTokensDetails(
        accepted_prediction_tokens=num_drafts[0], rejected_prediction_tokens=num_drafts[1]
    )


def total_drafts(completions: Iterable[CompletionOutput]) -> tuple[int, int] | None:
    """Draft tokens that were accepted and rejected; None if no completion had any."""
    counts = [one.num_drafts for one in completions if one.num_drafts is not None]
    if not counts:
        return None
    return sum(accepted for accepted, _ in counts), sum(rejected for _, rejected in counts)


def total_cached(outputs: Iterable[RequestOutput]) -> int:
    """Prompt tokens that `outputs` took from the prefix cache."""
    return sum(max(0, output.num_cached_tokens or 0) for output in outputs)


def cache_report(output: RequestOutput) -> dict[str, Any] | None:
    """The prefix cache's receipt, if the request asked for one."""
    return None if output.cache_report is None else output.cache_report.as_dict()


def now() -> int:
    """Seconds since the epoch, for `created`."""
    return int(time.time())
