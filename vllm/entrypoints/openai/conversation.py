# SPDX-License-Identifier: Apache-2.0
"""How the conversation of one request becomes text and token ids."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from vllm.entrypoints.chat_utils import parse_chat_messages
from vllm.entrypoints.openai.prompt_marks import Message
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import (
    ContentFormat,
    detect_content_format,
    knows_developers,
    require_chat_template,
    takes_arguments_as_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ConversationRenderer:
    """A chat template with everything but the messages filled in; slow, for a thread."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    content_format: ContentFormat
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    add_special_tokens: bool

    @classmethod
    def make(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        *,
        content_format: ContentFormat | None = None,
        documents: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> ConversationRenderer:
        """With `chat_template`, else the tokenizer's; `content_format` None asks the template.

        Raises `VLLMValidationError` where there is no template, or for `template_kwargs` that would
        replace what is given here.
        """
        template = require_chat_template(tokenizer, chat_template, tools)
        kwargs = template_kwargs or {}
        if kwargs and (reserved := sorted(_reserved_names(tokenizer) & kwargs.keys())):
            raise VLLMValidationError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}; use the request's own "
                "fields",
                parameter="chat_template_kwargs",
            )
        form = content_format or detect_content_format(template)
        return cls(tokenizer, template, form, tools, documents, kwargs, add_special_tokens)

    def parse(self, messages: list[Message]) -> list[Message]:
        """Messages in the form of the template; raises `VLLMValidationError` for a bad one."""
        as_text = takes_arguments_as_text(self.template)
        parsed = parse_chat_messages(messages, self.content_format, as_text)
        if not knows_developers(self.template):
            for message in parsed:
                if message["role"] == "developer":
                    message["role"] = "system"
        return parsed

    def render(
        self,
        parsed: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> str:
        """The text of parsed messages.

        Whatever the template raises is caused by the conversation or the template, so it becomes a
        `VLLMValidationError`.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                parsed,
                tools=cast("list[Any] | None", self.tools),
                documents=self.documents,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **self.template_kwargs,
            )
            return cast(str, text)
        except Exception as error:
            raise VLLMValidationError(
                f"the chat template cannot render these messages: {error}", parameter="messages"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text."""
        return self.tokenizer.encode(text, add_special_tokens=self.add_special_tokens)

    def ids(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        """Token ids of `messages`."""
        return self.encode(self.render(self.parse(messages), add_generation_prompt))

    def token_ends(self, text: str) -> list[int]:
        """For each of the text's tokens the number of characters up to its end.

        Where the tokenizer cannot tell, the length of what the tokens so far decode to.
        """
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(
                text, add_special_tokens=self.add_special_tokens, return_offsets_mapping=True
            )
            return [end for _, end in encoded["offset_mapping"]]
        pieces = (self.tokenizer.decode([token]) for token in self.encode(text))
        return list(accumulate(map(len, pieces)))

    def key(self, preamble: list[Message]) -> str:
        """Equal for conversations that begin in the same way."""
        parts = [preamble, self.tools, self.documents, self.template_kwargs, self.template]
        return json.dumps([*parts, self.add_special_tokens], default=str)


def _reserved_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that are no variables of a template: the tokenizer's own parameters, whatever its
    version has, and those of the call inside it."""
    parameters = inspect.signature(type(tokenizer).apply_chat_template).parameters
    return {*parameters, "messages", "processor_kwargs"}
