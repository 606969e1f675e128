# SPDX-License-Identifier: Apache-2.0
"""Requests to prompts: templating and tokenising in threads, so the event loop stays free."""

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.entrypoints.openai.conversation import ConversationRenderer
from vllm.entrypoints.openai.prompt_marks import Preambles, message_ends, preamble_of
from vllm.entrypoints.openai.protocol.chat import ConversationFields
from vllm.entrypoints.openai.request_limits import FLAG, RequestLimits
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import ContentFormat
from vllm.v1.engine.prompt_checks import truncated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

#: a prompt of more characters, or a body of more bytes, is long; and what a message counts beside
#: its content
_LONG = 32 * 1024
_PER_MESSAGE = 100


def _size_of(messages: Iterable[dict[str, Any]]) -> int:
    """About how many characters messages take, counted no further than it takes to be long."""
    size = 0
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, dict) else None
            size += _PER_MESSAGE + (len(text) if isinstance(text, str) else 0)
            if size > _LONG:
                return size
    return size


@dataclass(frozen=True)
class RenderedPrompt:
    """A tokenised prompt; `text` is None when the client sent ids. `marks`: token counts at which
    the prefix cache should be able to continue."""

    token_ids: list[int]
    text: str | None = None
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Truncation:
    """`truncate_prompt_tokens`, `truncation_side`, and the tokens that are to be generated."""

    keep: int | None = None
    side: str | None = None
    max_output_tokens: int = 1


@dataclass(frozen=True)
class ChatTemplateOptions:
    """The server's side of chat templating, from its flags."""

    chat_template: str | None = None
    content_format: ContentFormat | None = None
    trust_request_template: bool = False
    default_kwargs: dict[str, Any] | None = None
    hide_tools_when_choice_none: bool = False
    #: whether the end of a conversation's system messages and tools is worth a mark
    mark_preambles: bool = False


class PromptRenderer:
    """Owns the tokenizer and its threads; `tokenizer` None serves token ids only.

    `num_threads`: one per CPU, at most 8, if None. As many others take what is long, so that short
    requests never wait for it.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        max_model_len: int,
        vocab_size: int,
        options: ChatTemplateOptions,
        limits: RequestLimits | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.options = options
        self.limits = limits or RequestLimits()
        self._num_threads = num_threads or min(8, os.cpu_count() or 1)
        #: threads for what is short, and for what is long
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        self._preambles = Preambles()
        if tokenizer is not None:
            # The first call may reset truncation settings stored in the checkpoint, which is not
            # safe while another thread encodes.
            tokenizer.encode("warm up")

    def close(self) -> None:
        """Stop the threads; a later call of `run` starts them again."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *args: Any, size: int = 0) -> T:
        """`function(*args)` in one of the tokenizer threads; `size` in bytes, characters or ids
        says how long it may take."""
        long = size > _LONG
        if long not in self._pools:
            name = "long-prompts" if long else "tokenizer"
            self._pools[long] = ThreadPoolExecutor(self._num_threads, name)
        return await asyncio.get_running_loop().run_in_executor(self._pools[long], function, *args)

    def require_tokenizer(self, parameter: str) -> "PreTrainedTokenizerBase":
        """The tokenizer, or an error for servers started with --skip-tokenizer-init."""
        if self.tokenizer is None:
            raise VLLMValidationError(
                "the server runs without a tokenizer (--skip-tokenizer-init); send prompts as "
                "token ids to /v1/completions",
                parameter=parameter,
            )
        return self.tokenizer

    async def completion_prompt(
        self,
        prompt: str | list[int],
        *,
        add_special_tokens: bool,
        truncation: Truncation = Truncation(),
    ) -> RenderedPrompt:
        """Text is tokenised; ids go through unchanged, without a begin-of-sequence token."""
        if isinstance(prompt, list):
            return RenderedPrompt(self.truncated(prompt, truncation))
        tokenizer = self.require_tokenizer("prompt")
        self._check_length(prompt, "prompt")
        ids = await self.run(self._encode, tokenizer, prompt, add_special_tokens, size=len(prompt))
        return RenderedPrompt(self.truncated(ids, truncation), prompt)

    async def chat_prompt(
        self,
        request: ConversationFields,
        *,
        truncation: Truncation = Truncation(),
        hide_tools: bool = False,
        mark_messages: bool = False,
    ) -> RenderedPrompt:
        """The conversation through the chat template, tokenised; `mark_messages` marks the end of
        every message."""
        request.check_conversation()
        self.limits.check_conversation(request.messages, request.tools)
        size = _size_of(request.messages)
        text, ids, marks = await self.run(
            self._render_chat, request, hide_tools, mark_messages, size=size
        )
        kept = self.truncated(ids, truncation)
        cut = 0 if truncation.side == "right" else len(ids) - len(kept)
        marks = [mark - cut for mark in marks if 0 < mark - cut <= len(kept)]
        return RenderedPrompt(kept, text, tuple(marks))

    async def decode(
        self, token_ids: list[int], skip_special_tokens: bool, parameter: str = "tokens"
    ) -> str:
        """Text of `token_ids`; raises `VLLMValidationError` naming `parameter` for ids outside
        the vocabulary."""
        tokenizer = self.require_tokenizer(parameter)
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self.vocab_size:
            raise VLLMValidationError(
                f"token id {low if low < 0 else high} is outside the vocabulary of "
                f"{self.vocab_size} tokens",
                parameter=parameter,
            )
        text = await self.run(
            lambda: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
            size=len(token_ids),
        )
        return cast(str, text)

    def truncated(self, ids: list[int], how: Truncation) -> list[int]:
        """`ids` as the request asks; see `prompt_checks.truncated`."""
        return truncated(ids, how.keep, self.max_model_len, how.max_output_tokens, how.side)

    def _check_length(self, text: str, parameter: str) -> None:
        """Raise `VLLMValidationError` for a text so long that tokenising it would be in vain."""
        per_token = self.limits.chars_per_token
        most = self.max_model_len * per_token
        if len(text) > most:
            raise VLLMValidationError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the "
                f"prompt has {len(text)} characters, more than the {most} that are tokenised "
                f"({per_token} per token; {FLAG}, chars_per_token). Please shorten the prompt.",
                parameter=parameter,
            )

    def _encode(
        self, tokenizer: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool
    ) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render_chat(
        self, request: ConversationFields, hide_tools: bool, mark_messages: bool
    ) -> tuple[str, list[int], list[int]]:
        conversation = self._conversation(request, hide_tools)
        parsed = conversation.parse(request.messages)
        text = conversation.render(
            parsed, bool(request.add_generation_prompt), bool(request.continue_final_message)
        )
        self._check_length(text, "messages")
        ids = conversation.encode(text)
        marks: list[int] = []
        if mark_messages:
            most = self.limits.cache_checkpoints
            parts = (parsed[:count] for count in range(1, len(parsed) + 1)[-most:])
            marks = message_ends(parts, text, conversation.render, conversation.token_ends(text))
        preamble = preamble_of(request.messages)
        if self.options.mark_preambles and (preamble or conversation.tools):
            key = conversation.key(preamble)
            marks.append(self._preambles.end_in(ids, preamble, key, conversation.ids))
        return text, ids, marks

    def _conversation(self, request: ConversationFields, hide_tools: bool) -> ConversationRenderer:
        tokenizer = self.require_tokenizer("messages")
        if request.chat_template is not None and not self.options.trust_request_template:
            raise VLLMValidationError(
                "chat templates in requests are refused; start the server with "
                "--trust-request-chat-template to allow them",
                parameter="chat_template",
            )
        kwargs = {**(self.options.default_kwargs or {}), **(request.chat_template_kwargs or {})}
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        return ConversationRenderer.make(
            tokenizer,
            request.chat_template or self.options.chat_template,
            None if hide_tools else request.tools or None,
            content_format=self.options.content_format,
            documents=request.documents,
            template_kwargs=kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )
