# SPDX-License-Identifier: Apache-2.0
"""langchain-openai on both of OpenAI's protocols; `langchain_client.py URL MODEL`."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Report(BaseModel):
    """A report."""

    unit: Literal["C", "F"]


@tool
def weather(unit: Literal["C", "F"]) -> str:
    """The weather now."""
    return "7"


def model(responses: bool, max_tokens: int) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="k",
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        use_responses_api=responses,
    )


texts = set()
for responses in (False, True):
    short, long = model(responses, 12), model(responses, 60)
    whole = short.invoke("Write a class")
    streamed = "".join(chunk.text for chunk in short.stream("Write a class"))
    assert whole.text == streamed, (whole, streamed)
    assert whole.usage_metadata["output_tokens"] == 12, whole
    texts.add(streamed)
    asked = [HumanMessage("How warm is it?")]
    called = long.bind_tools([weather], tool_choice="weather").invoke(asked)
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["unit"] in ("C", "F"), called
    result = ToolMessage("7", tool_call_id=call["id"])
    assert short.bind_tools([weather]).invoke([*asked, called, result]).text
    report = long.with_structured_output(Report, method="json_schema").invoke("Report")
    assert report.unit in ("C", "F"), report
assert len(texts) == 1, texts
