# SPDX-License-Identifier: Apache-2.0
"""`use_beam_search`: the `n` best continuations of a prompt instead of `n` samples."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.beam_search import BeamSearch, BeamSearchSequence
from vllm.entrypoints.offline_beam_search import one_token, start_beam_search
from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.rendering import RenderedPrompt
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.exceptions import EngineGenerateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.v1.engine.async_llm import AsyncLLM

#: field -> its value without effect, besides null, false, 0 and empty ones
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
#: what a search of the likeliest texts has no place for
_INCOMPATIBLE = (
    "stream", "stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k",
    "min_p", "logprobs", "prompt_logprobs", "kv_transfer_params", "cache_checkpoints",
    "cache_pin_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class ServedBeams:
    """Runs searches with the server's engine, or one replica of it: every step of every beam is a
    request for a token."""

    engine: AsyncLLM
    tokenizer: PreTrainedTokenizerBase | None
    data_parallel_rank: int | None = None

    async def search(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt: RenderedPrompt,
        params: SamplingParams,
    ) -> RequestOutput:
        """The finished output with `n` completions, best first; `params` as without beams.

        Raises `VLLMValidationError` for what beams cannot honour, and as `AsyncLLM.generate` does.
        """
        search = start_beam_search(
            self.engine.input_processor,
            TokensPrompt(prompt_token_ids=prompt.token_ids),
            _beam_params(request, params),
        )
        step = 0
        async with self.engine.one_placement() as own:
            placement = own if params.placement is None else params.placement
            while not search.done:
                step_id = f"{request_id}-{step}"
                search.advance(await self._choices(search, request, placement, step_id))
                step += 1
        # Decoding a long text takes longer than the event loop should wait.
        completions = await asyncio.to_thread(self._completions, search, prompt.token_ids, params)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            prompt_logprobs=None,
            outputs=completions,
            finished=True,
            num_cached_tokens=0,
        )

    async def _choices(
        self,
        search: BeamSearch,
        request: GenerationRequest,
        placement: str | list[str] | None,
        step_id: str,
    ) -> list[dict[int, Logprob]]:
        """What each running beam can go on with. When one fails, the others are aborted."""
        tasks = [
            asyncio.create_task(
                self._next_tokens(
                    beam, one_token(search.num_choices, placement), request, f"{step_id}-{index}"
                )
            )
            for index, beam in enumerate(search.running)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_tokens(
        self,
        beam: BeamSearchSequence,
        params: SamplingParams,
        request: GenerationRequest,
        one_id: str,
    ) -> dict[int, Logprob]:
        outputs = self.engine.generate(
            TokensPrompt(prompt_token_ids=beam.tokens),
            params,
            one_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            data_parallel_rank=self.data_parallel_rank,
        )
        output = [output async for output in outputs][-1]
        completion = output.outputs[0]
        if completion.logprobs is None:
            raise EngineGenerateError(f"request {one_id} failed")
        return completion.logprobs[0]

    def _completions(
        self, search: BeamSearch, prompt_ids: list[int], params: SamplingParams
    ) -> list[CompletionOutput]:
        completions = []
        for index, sequence in enumerate(search.output().sequences):
            token_ids = sequence.tokens[len(prompt_ids) :]
            detokenizer = Detokenizer(self.tokenizer, prompt_ids, params)
            detokenizer.update(token_ids, ends_with_stop_token=False)
            completions.append(
                CompletionOutput(
                    index=index,
                    text=detokenizer.text,
                    token_ids=token_ids,
                    cumulative_logprob=sequence.cum_logprob,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                )
            )
        return completions


def _beam_params(request: GenerationRequest, params: SamplingParams) -> BeamSearchParams:
    if params.structured_outputs is not None:
        raise VLLMValidationError(
            "beam search follows no constraint; leave out response_format, structured_outputs and "
            "forced tool calls, or use_beam_search",
            "use_beam_search",
        )
    fields: dict[str, Any] = request.model_dump(include=set(_INCOMPATIBLE))
    for name in _INCOMPATIBLE:
        value = fields.get(name)
        if value and value != _NEUTRAL.get(name):
            refuse(name, f"{name} has no meaning with use_beam_search; leave one of them out")
    return BeamSearchParams(
        beam_width=request.num_choices,
        max_tokens=params.max_tokens or 1,
        ignore_eos=bool(request.ignore_eos),
        temperature=request.temperature or 0.0,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
    )
