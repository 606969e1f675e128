# SPDX-License-Identifier: Apache-2.0
"""litellm over all three protocols; `litellm_client.py URL MODEL`."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network on import

import litellm  # noqa: E402

URL, MODEL = sys.argv[1:]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "k", "temperature": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "k", "temperature": 0}
MESSAGES = [{"role": "user", "content": "Write a class"}]
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": UNIT}}


def text_is_the_same_whole_and_streamed(where: dict) -> str:
    whole = litellm.completion(**where, messages=MESSAGES, max_tokens=16)
    chunks = litellm.completion(**where, messages=MESSAGES, max_tokens=16, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    text = whole.choices[0].message.content
    assert text and text == streamed, (text, streamed)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    return text


def a_forced_call_is_complete(where: dict) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    reply = litellm.completion(
        **where, messages=MESSAGES, max_tokens=60, tools=[TOOL], tool_choice=choice
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")


texts = {text_is_the_same_whole_and_streamed(where) for where in (OPENAI, ANTHROPIC)}
assert len(texts) == 1, texts
for where in (OPENAI, ANTHROPIC):
    a_forced_call_is_complete(where)

response = litellm.responses(**OPENAI, input="Write a class", max_output_tokens=16)
assert response.output_text in texts and response.status == "incomplete", response
events = list(litellm.responses(**OPENAI, input="Write a class", max_output_tokens=16, stream=True))
assert events[-1].response.output_text in texts, events[-1]
