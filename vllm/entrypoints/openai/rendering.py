# SPDX-License-Identifier: Apache-2.0
"""Requests to prompts: templating and tokenising in threads, so the event loop stays free."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.entrypoints.openai.conversation import ConversationRenderer
from vllm.entrypoints.openai.prompt_marks import Preambles, message_ends, preamble_of
from vllm.entrypoints.openai.protocol.chat import ConversationFields
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import ContentFormat, detect_content_format, require_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class RenderedPrompt:
    """A tokenised prompt; `text` is None when the client sent ids. `marks`: token counts at which
    the prefix cache should be able to continue."""

    token_ids: list[int]
    text: str | None = None
    marks: tuple[int, ...] = ()


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

    `num_threads`: one per CPU, at most 8, if None.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        max_model_len: int,
        vocab_size: int,
        options: ChatTemplateOptions,
        num_threads: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.options = options
        self._num_threads = num_threads or min(8, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None
        self._preambles = Preambles()
        if tokenizer is not None:
            # The first call may reset truncation settings stored in the checkpoint, which is not
            # safe while another thread encodes.
            tokenizer.encode("warm up")

    def close(self) -> None:
        """Stop the threads; a later call of `run` starts them again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in one of the tokenizer threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "tokenizer")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

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
        truncate: int | None = None,
        max_output_tokens: int = 1,
    ) -> RenderedPrompt:
        """Text is tokenised; ids go through unchanged, without a begin-of-sequence token."""
        if isinstance(prompt, list):
            return RenderedPrompt(self.truncated(prompt, truncate, max_output_tokens))
        tokenizer = self.require_tokenizer("prompt")
        ids = await self.run(self._encode, tokenizer, prompt, add_special_tokens)
        return RenderedPrompt(self.truncated(ids, truncate, max_output_tokens), prompt)

    async def chat_prompt(
        self,
        request: ConversationFields,
        *,
        truncate: int | None = None,
        max_output_tokens: int = 1,
        hide_tools: bool = False,
        mark_messages: bool = False,
    ) -> RenderedPrompt:
        """The conversation through the chat template, tokenised; `mark_messages` marks the end of
        every message."""
        request.check_conversation()
        text, ids, marks = await self.run(self._render_chat, request, hide_tools, mark_messages)
        kept = self.truncated(ids, truncate, max_output_tokens)
        cut = len(ids) - len(kept)
        return RenderedPrompt(kept, text, tuple(mark - cut for mark in marks if mark > cut))

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
            lambda: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )
        return cast(str, text)

    def truncated(self, ids: list[int], keep: int | None, max_output_tokens: int) -> list[int]:
        """The last `keep` ids; -1 keeps what leaves room for `max_output_tokens`."""
        if keep is None:
            return ids
        if keep == -1:
            keep = max(1, self.max_model_len - max(1, max_output_tokens))
        if not 1 <= keep <= self.max_model_len:
            raise VLLMValidationError(
                f"truncate_prompt_tokens must be -1 or in [1, {self.max_model_len}], got {keep}",
                parameter="truncate_prompt_tokens",
            )
        return ids[-keep:]

    def _encode(
        self, tokenizer: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool
    ) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render_chat(
        self, request: ConversationFields, hide_tools: bool, mark_messages: bool
    ) -> tuple[str, list[int], list[int]]:
        conversation = self._conversation(request, hide_tools)
        text = conversation.text(
            request.messages,
            bool(request.add_generation_prompt),
            bool(request.continue_final_message),
        )
        ids = conversation.encode(text)
        marks = message_ends(request.messages, ids, conversation.ids) if mark_messages else []
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
        tools = None if hide_tools else request.tools or None
        template = require_chat_template(
            tokenizer, request.chat_template or self.options.chat_template, tools
        )
        kwargs = {**(self.options.default_kwargs or {}), **(request.chat_template_kwargs or {})}
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        return ConversationRenderer(
            tokenizer,
            template,
            self.options.content_format or detect_content_format(template),
            tools,
            request.documents,
            kwargs,
            bool(request.add_special_tokens),
        )
