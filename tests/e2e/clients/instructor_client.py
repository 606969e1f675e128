# SPDX-License-Identifier: Apache-2.0
"""instructor with tools, schemas and responses; `instructor_client.py URL MODEL`."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="k", max_retries=0)


class Report(BaseModel):
    """A report."""

    unit: Literal["C", "F"]
    warm: bool


for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
):
    limit = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
    report = instructor.from_openai(CLIENT, mode=mode).create(
        model=MODEL,
        messages=[{"role": "user", "content": "Report"}],
        response_model=Report,
        max_retries=0,
        temperature=0,
        **{limit: 60},
    )
    assert isinstance(report, Report), (mode, report)
