# SPDX-License-Identifier: Apache-2.0
"""One reply of the chat route, for routes that speak another protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.openai.chat_reply import ReplyDelta
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.protocol.base import refuse, renamed
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest
from vllm.entrypoints.openai.serving_chat import PlannedChat, ServingChat
from vllm.entrypoints.openai.serving_engine import RequestContext
from vllm.exceptions import VLLMValidationError

#: fields of the chat API whose results other protocols have no place for -> what to do instead
_USE_CHAT = "use /v1/chat/completions"
CHAT_ONLY = {
    "n": "send the request several times",
    "prompt_logprobs": _USE_CHAT,
    "return_token_ids": _USE_CHAT,
    "return_tokens_as_token_ids": _USE_CHAT,
    "return_cache_report": _USE_CHAT,
    "kv_transfer_params": _USE_CHAT,
}


@dataclass(frozen=True)
class ReplyPiece:
    """What one engine output adds to the reply."""

    delta: ReplyDelta
    finish_reason: str | None
    stop_reason: int | str | None
    #: OpenAI's entries for the tokens of the piece, empty unless asked for
    logprobs: list[dict[str, Any]]


@dataclass
class ChatTurn:
    """A planned reply with one choice; the chat route's own plan, parsers and engine calls.

    `parameters`: fields of the chat API -> the route's names of them, in errors.
    `num_tokens`: of the pieces so far; `num_cached`: of the prompt, found in the prefix cache;
    `num_drafts`: draft tokens that were accepted and rejected, of a finished reply that had any.
    """

    chat: ServingChat
    request: ChatCompletionRequest
    context: RequestContext
    model: str
    planned: PlannedChat
    parameters: Mapping[str, str]
    num_tokens: int = 0
    num_cached: int = 0
    num_drafts: tuple[int, int] | None = None

    @classmethod
    async def begin(
        cls,
        chat: ServingChat,
        request: ChatCompletionRequest,
        context: RequestContext,
        id_prefix: str,
        parameters: Mapping[str, str],
        most_tokens: int | None = None,
    ) -> ChatTurn:
        """Plan `request`; raises `VLLMValidationError` with the names that `parameters` gives to
        the chat API's fields. `most_tokens`: see `ServingChat.plan`."""
        try:
            model, planned = await chat.begin(request, context, most_tokens)
        except VLLMValidationError as error:
            raise renamed(error, parameters) from None
        base_id = planned.request_id.partition("-")[2]
        planned = replace(planned, request_id=f"{id_prefix}_{base_id}")
        return cls(chat, request, context, model, planned, parameters)

    @property
    def id(self) -> str:
        """The reply's id, under which `/abort_requests` ends it."""
        return self.planned.request_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.planned.prompt.token_ids)

    @property
    def fills_context(self) -> bool:
        """Whether the longest reply ends where the model's context does."""
        room = self.chat.models.max_model_len - self.num_prompt
        return (self.planned.params.max_tokens or 0) >= room

    async def pieces(self) -> AsyncGenerator[ReplyPiece, None]:
        """The reply as it comes, in one piece unless the request streams; the last one has a
        finish reason. Raises `APIError` when the request is aborted."""
        splitter = self.chat.splitter(self.request, self.planned)
        source = self.chat.generate([self.planned], self.request, self.context)
        try:
            async for _, output in source:
                for completion in output.outputs:
                    reason = completion.finish_reason
                    if reason == "abort":
                        raise _aborted(self.id)
                    delta = ReplyDelta("", completion.text, ())
                    if splitter is not None:
                        delta = splitter.feed(completion.text, finished=reason is not None)
                        reason = splitter.finish_reason(reason)
                    make = partial(self.chat.logprobs, self.request, completion)
                    logprobs = await self.chat.build([output], make)
                    self.num_tokens += len(completion.token_ids)
                    self.num_cached = self._cached(output.num_cached_tokens)
                    self.num_drafts = completion.num_drafts
                    entries = logprobs["content"] if logprobs else []
                    yield ReplyPiece(delta, reason, completion.stop_reason, entries)
        except VLLMValidationError as error:
            raise renamed(error, self.parameters) from None
        finally:
            await source.aclose()

    async def count(self, text: str) -> int:
        """Tokens that the tokenizer makes of `text`."""
        tokenizer = self.chat.renderer.tokenizer
        if tokenizer is None or not text:
            return 0
        encode = tokenizer.encode
        return await self.chat.renderer.run(
            lambda: len(encode(text, add_special_tokens=False)), size=len(text)
        )

    def _cached(self, num_cached: int | None) -> int:
        reported = self.chat.options.prompt_tokens_details
        return max(0, num_cached or 0) if reported else 0


async def count_prompt(
    chat: ServingChat, request: ChatCompletionRequest, parameters: Mapping[str, str]
) -> int:
    """Tokens of the prompt of `request`; raises as `ChatTurn.begin`."""
    chat.models.check(request.model)
    try:
        return len((await chat.prompt(request)).token_ids)
    except VLLMValidationError as error:
        raise renamed(error, parameters) from None


def chat_request(
    request: GenerationRequest, translated: Mapping[str, Any]
) -> ChatCompletionRequest:
    """The chat request that has the sampling fields of `request` and what was `translated` from
    its other fields; None in there leaves the chat API's default."""
    shared = request.model_fields_set & GenerationRequest.model_fields.keys() - {"stream_options"}
    fields = {name: getattr(request, name) for name in shared}
    fields.update({name: value for name, value in translated.items() if value is not None})
    return ChatCompletionRequest.model_validate(fields)


def free_text_format(choice: Any, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format of the text; none where `choice`, in the chat API's form, forces a call: then
    there is no text."""
    return given if choice in (None, "auto", "none") else None


def refuse_fields(request: GenerationRequest, instead: Mapping[str, str]) -> None:
    """Raise `VLLMValidationError` for the first field of `instead` that the request uses, or
    for one that has another name now."""
    request.check_names()
    for name, what in instead.items():
        value = getattr(request, name)
        used = value != 1 if name == "n" else value is not False
        if value is not None and used:
            refuse(name, f"{name} is not supported on this route; {what}")


def joined_system(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the system messages at their beginning made one, as templates want it."""
    texts: list[str] = []
    rest: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and not rest:
            texts.append(message["content"])
        else:
            rest.append(message)
    head = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return head + rest


def _aborted(request_id: str) -> APIError:
    # Clients repeat requests after a 409 or any 5xx; this one was ended on purpose.
    return APIError(HTTPStatus.GONE, "RequestAborted", f"The request {request_id} was aborted.")
