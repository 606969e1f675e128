# SPDX-License-Identifier: Apache-2.0
"""Runs beam searches with an engine: every step of every beam is a request for one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tqdm import tqdm

from vllm.beam_search import BeamSearch
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

#: runs a batch of requests with parameters per prompt; outputs in the order of the prompts
Generate: TypeAlias = Callable[[list[PromptType], list[SamplingParams]], list[RequestOutput]]


def start_beam_search(
    processor: InputProcessor, prompt: PromptType, params: BeamSearchParams
) -> BeamSearch:
    """A search from `prompt`; raises `VLLMValidationError` if it cannot be served.

    It generates `max_tokens`, or what the context has room for.
    """
    request = processor.process("beam-search", prompt, one_token(0)).request
    room = processor.max_model_len - len(request.prompt_token_ids)
    search = BeamSearch(
        request.prompt_token_ids,
        params,
        request.sampling_params.eos_token_ids or (),
        min(params.max_tokens, room),
    )
    limit = processor.model_config.max_logprobs
    if limit != -1 and search.num_choices > limit:
        raise VLLMValidationError(
            f"beam_width {params.beam_width} needs the {search.num_choices} likeliest tokens of "
            f"each beam; max_logprobs allows {limit}",
            "beam_width",
            params.beam_width,
        )
    return search


def run_beam_searches(
    generate: Generate, searches: Sequence[BeamSearch], at_once: int, bar: tqdm[Any]
) -> None:
    """Run all searches to their end, at most `at_once` at a time; `bar` counts them."""
    waiting, running = list(searches)[::-1], list[BeamSearch]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop())
        _advance(generate, running)
        bar.update(sum(search.done for search in running))
        running = [search for search in running if not search.done]


def _advance(generate: Generate, searches: Sequence[BeamSearch]) -> None:
    """One token for every beam of every search, in one batch."""
    prompts: list[PromptType] = []
    params: list[SamplingParams] = []
    for search in searches:
        for beam in search.running:
            prompts.append(TokensPrompt(prompt_token_ids=beam.tokens))
            params.append(one_token(search.num_choices))
    outputs = iter(generate(prompts, params))
    for search in searches:
        choices = []
        for _ in search.running:
            completion = next(outputs).outputs[0]
            assert completion.logprobs is not None, completion
            choices.append(completion.logprobs[0])
        search.advance(choices)


def one_token(num_choices: int, placement: str | list[str] | None = None) -> SamplingParams:
    """Parameters of one step of one beam: the `num_choices` likeliest next tokens."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=num_choices,
        detokenize=False,
        placement=placement,
    )
