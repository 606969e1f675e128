# SPDX-License-Identifier: Apache-2.0
"""A fake engine that says what a test tells it to, and stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

#: a template that shows everything a conversation may hold
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}"
    "{% endfor %}{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}"
    "{% endif %}{% endif %}"
)
#: a script of text and a call, the same after reasoning, and the arguments that understand both
HERMES = 'Hm.<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
FULL = "I think.</think>" + HERMES
PARSERS: dict[str, Any] = {
    "reasoning_parser": "qwen3",
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}


class ScriptedEngine(FakeAsyncLLM):
    """Says `script`, one for all choices or one each, `piece` characters per output."""

    def __init__(self) -> None:
        super().__init__()
        assert self.tokenizer is not None
        self.tokenizer.chat_template = TEMPLATE
        self.script: str | list[str] = ""
        self.piece = 1
        self.finish_reason = "stop"

    async def _outputs(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        scripts = [self.script] * params.n if isinstance(self.script, str) else self.script
        delta = params.output_kind is RequestOutputKind.DELTA
        step = self.piece if delta else max(map(len, scripts)) or 1
        starts = range(0, max(map(len, scripts)) or 1, step)
        for start in starts:
            await asyncio.sleep(0)
            last = start == starts[-1]
            yield RequestOutput(
                request_id=request_id,
                prompt=prompt.get("prompt"),
                prompt_token_ids=prompt["prompt_token_ids"],
                prompt_logprobs=None,
                outputs=[
                    self._said(index, script[start : start + step], params, last)
                    for index, script in enumerate(scripts)
                ],
                finished=last,
            )

    def _said(self, index: int, text: str, params: SamplingParams, last: bool) -> CompletionOutput:
        ids = [ord(char) % 256 for char in text]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self._position(token, params.logprobs) for token in ids]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason=self.finish_reason if last else None,
            stop_reason=None,
        )
