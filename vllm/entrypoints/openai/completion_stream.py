# SPDX-License-Identifier: Apache-2.0
"""Chunks of a streamed completion."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai import logprobs as lp
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.reply_stream import TextStream
from vllm.entrypoints.openai.serving_engine import OpenAIServing, Planned, now
from vllm.entrypoints.openai.streaming import TextEvents, event
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import TokenDecoder, make_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextOffsets:
    """Offsets of generated tokens, decoded with the prompt before them, as the engine does.

    A token that adds no text of its own (a special token that is skipped, the first bytes of a
    character) begins where the next text does. `start`: characters before the first token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: list[int],
        params: SamplingParams,
        start: int,
    ) -> None:
        self._decoder: TokenDecoder | None = None
        if tokenizer is not None and params.detokenize:
            self._decoder = make_decoder(tokenizer, prompt_ids, params)
        self._end = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens `[n]`, in characters."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            if self._decoder is not None:
                self._end += len(self._decoder.decode(token_id))
        return offsets


@dataclass(frozen=True)
class Echo:
    """What stands before a choice's own text: the prompt's text, and for logprobs where each of
    its tokens begins there; nothing without `echo`."""

    text: str = ""
    offsets: Sequence[int] = ()

    def then(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: list[int],
        params: SamplingParams,
    ) -> TextOffsets:
        """Counts where the generated tokens of one choice begin."""
        return TextOffsets(tokenizer, prompt_ids, params, len(self.text))


def prompt_offsets(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], text: str
) -> list[int]:
    """Where the tokens `[n]` of an echoed prompt begin in `text`.

    A special token has no width unless the text shows it: the tokenizer may have added it, or the
    text may be a decoding without it. Then the text of those behind does not depend on it either.
    """
    special = set(tokenizer.all_special_ids)
    decoder = make_decoder(tokenizer, [], SamplingParams(skip_special_tokens=False))
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(min(end, len(text)))
        if token_id in special and not text.startswith(str(tokenizer.decode([token_id])), end):
            continue
        end += len(decoder.decode(token_id))
    return offsets


@dataclass
class _Choice:
    """What one choice has sent: where its tokens begin, and whether its first chunk is out.

    `texts`: frames its chunks that hold nothing but new text.
    """

    offsets: TextOffsets | None
    texts: TextEvents
    started: bool = False


class CompletionStream(TextStream):
    """Frames new text from a template, and builds all other chunks as plain dicts."""

    def __init__(
        self,
        serving: OpenAIServing,
        request: CompletionRequest,
        reply_id: str,
        model: str,
        planned: list[Planned],
        echoed: Sequence[Echo],
    ) -> None:
        head = {
            "id": reply_id,
            "object": "text_completion",
            "created": now(),
            "model": model,
        }
        super().__init__(serving, request, [len(p.prompt.token_ids) for p in planned], head)
        self._request = request
        self._planned = planned
        self._echoed = echoed
        self._as_ids = serving.tokens_as_ids(request)
        self._decode = serving.decode_token
        tokenizer, scored = serving.renderer.tokenizer, request.logprobs is not None
        starts = [
            echo.then(tokenizer, one.prompt.token_ids, one.params) if scored else None
            for one, echo in zip(planned, echoed, strict=True)
            for _ in range(request.num_choices)
        ]
        self._choices = [
            _Choice(start, TextEvents(functools.partial(self._text_chunk, index)))
            for index, start in enumerate(starts)
        ]
        #: whether chunks hold nothing but text until their choice ends
        self._only_text = not (
            scored
            or request.return_token_ids
            or request.max_tokens == 0
            or self._usage_on_every_chunk
        )

    def _goes_on(self, index: int) -> bool:
        return self._only_text and self._choices[index].started

    def _text_event(self, index: int, text: str) -> bytes:
        return self._choices[index].texts.event(text)

    def _events(self, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(
            event(chunk)
            for completion in output.outputs
            for chunk in self._chunks(prompt_index, output, completion)
        )

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        return {**self._head, "choices": [_choice(index, text)]}

    def _chunks(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        index = prompt_index * self._num_choices + completion.index
        state = self._choices[index]
        token_ids = completion.token_ids
        scored_only = self._request.max_tokens == 0
        if not token_ids and completion.finish_reason is None:
            return
        if self._request.echo and not state.started:
            yield self._echo_chunk(index, prompt_index, output)
        finish_reason = completion.finish_reason
        if scored_only and finish_reason is None:
            return
        choice = _choice(index, "")
        if scored_only:
            choice["finish_reason"] = "length"
        else:
            choice["text"] = completion.text
            choice["logprobs"] = self._logprobs(state, completion)
            choice["finish_reason"] = finish_reason
            choice["stop_reason"] = completion.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = [] if scored_only else list(token_ids)
            if not state.started:
                choice["prompt_token_ids"] = self._planned[prompt_index].prompt.token_ids
        state.started = True
        if not scored_only:
            self._num_generated += len(token_ids)
        chunk = self._chunk([choice])
        if finish_reason is not None and output.cache_report is not None:
            chunk["cache_report"] = output.cache_report.as_dict()
        if completion.kv_transfer_params is not None:
            chunk["kv_transfer_params"] = completion.kv_transfer_params
        yield chunk

    def _echo_chunk(self, index: int, prompt_index: int, output: RequestOutput) -> dict[str, Any]:
        state = self._choices[index]
        prompt_ids = self._planned[prompt_index].prompt.token_ids
        logprobs = None
        if self._request.logprobs is not None:
            reply = lp.completion_logprobs(
                prompt_ids,
                output.prompt_logprobs or (),
                as_ids=self._as_ids,
                decode=self._decode,
                offsets=self._echoed[prompt_index].offsets,
            )
            logprobs = reply.model_dump()
        choice = _choice(index, self._echoed[prompt_index].text)
        choice["logprobs"] = logprobs
        if self._request.return_token_ids:
            choice["token_ids"] = []
            choice["prompt_token_ids"] = prompt_ids
        state.started = True
        return self._chunk([choice])

    def _logprobs(self, state: _Choice, completion: CompletionOutput) -> dict[str, Any] | None:
        if state.offsets is None:
            return None
        reply = lp.completion_logprobs(
            completion.token_ids,
            completion.logprobs or (),
            as_ids=self._as_ids,
            decode=self._decode,
            offsets=state.offsets.of(completion.token_ids),
        )
        return reply.model_dump()


def _choice(index: int, text: str) -> dict[str, Any]:
    """The choice of a chunk that holds new text and nothing else."""
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
