# SPDX-License-Identifier: Apache-2.0
"""How the conversation of one request becomes text and token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.chat_utils import parse_chat_messages
from vllm.entrypoints.openai.prompt_marks import Message
from vllm.renderers.hf import ContentFormat, render_conversation

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

    def parse(self, messages: list[Message]) -> list[Message]:
        """Messages in the form of the template; raises `VLLMValidationError` for a bad one."""
        return parse_chat_messages(messages, self.content_format)

    def render(
        self,
        parsed: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> str:
        """The text of parsed messages; raises `VLLMValidationError` where the template refuses."""
        return render_conversation(
            self.tokenizer,
            parsed,
            chat_template=self.template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=self.tools,
            documents=self.documents,
            template_kwargs=self.template_kwargs,
        )

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
